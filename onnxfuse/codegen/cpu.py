"""How to ask an x86 CPU and its operating system for a feature, by LLVM's name of it."""

from __future__ import annotations

# LLVM feature -> (cpuid leaf, sub-leaf, register 0..3 = a b c d, bit, bits of XCR0 the operating system must have set)
_YMM, _ZMM, _AMX = 0x6, 0xE6, 0x60000
CPU_FEATURES: dict[str, tuple[int, int, int, int, int]] = {
    "sse": (1, 0, 3, 25, 0),
    "sse2": (1, 0, 3, 26, 0),
    "sse3": (1, 0, 2, 0, 0),
    "pclmul": (1, 0, 2, 1, 0),
    "ssse3": (1, 0, 2, 9, 0),
    "fma": (1, 0, 2, 12, _YMM),
    "cx16": (1, 0, 2, 13, 0),
    "sse4.1": (1, 0, 2, 19, 0),
    "sse4.2": (1, 0, 2, 20, 0),
    "movbe": (1, 0, 2, 22, 0),
    "popcnt": (1, 0, 2, 23, 0),
    "aes": (1, 0, 2, 25, 0),
    "avx": (1, 0, 2, 28, _YMM),
    "f16c": (1, 0, 2, 29, _YMM),
    "bmi": (7, 0, 1, 3, 0),
    "avx2": (7, 0, 1, 5, _YMM),
    "bmi2": (7, 0, 1, 8, 0),
    "avx512f": (7, 0, 1, 16, _ZMM),
    "avx512dq": (7, 0, 1, 17, _ZMM),
    "adx": (7, 0, 1, 19, 0),
    "avx512ifma": (7, 0, 1, 21, _ZMM),
    "avx512cd": (7, 0, 1, 28, _ZMM),
    "avx512bw": (7, 0, 1, 30, _ZMM),
    "avx512vl": (7, 0, 1, 31, _ZMM),
    "avx512vbmi": (7, 0, 2, 1, _ZMM),
    "avx512vbmi2": (7, 0, 2, 6, _ZMM),
    "gfni": (7, 0, 2, 8, 0),
    "vaes": (7, 0, 2, 9, _YMM),
    "avx512vnni": (7, 0, 2, 11, _ZMM),
    "avx512bitalg": (7, 0, 2, 12, _ZMM),
    "avx512vpopcntdq": (7, 0, 2, 14, _ZMM),
    "avx512fp16": (7, 0, 3, 23, _ZMM),
    "amx-bf16": (7, 0, 3, 22, _AMX),
    "amx-tile": (7, 0, 3, 24, _AMX),
    "amx-int8": (7, 0, 3, 25, _AMX),
    "avxvnni": (7, 1, 0, 4, _YMM),
    "avx512bf16": (7, 1, 0, 5, _ZMM),
    "lzcnt": (0x80000001, 0, 2, 5, 0),
    "sse4a": (0x80000001, 0, 2, 6, 0),
    "fma4": (0x80000001, 0, 2, 16, _YMM),
    "tbm": (0x80000001, 0, 2, 21, 0),
}

# How floating point is set up on this thread. A module as LLVM text:
#   float_state   the control bits of MXCSR (rounding, flushing, masks; not the flags that operations leave) and the
#                 control word of the x87
#   denormals     whether an operation has met a denormal operand
#   soil          forgets that, and fills 64 KiB of the stack below with a number
FLOAT_STATE = r"""
define i64 @float_state() {
  %m = alloca i32, align 8
  %c = alloca i16, align 8
  call void asm sideeffect "stmxcsr ($0)\0Afnstcw ($1)", "r,r,~{memory}"(ptr %m, ptr %c)
  %mxcsr = load i32, ptr %m, align 8
  %control = and i32 %mxcsr, 65472
  %x87 = load i16, ptr %c, align 8
  %high = zext i16 %x87 to i64
  %up = shl i64 %high, 32
  %low = zext i32 %control to i64
  %out = or i64 %up, %low
  ret i64 %out
}
define i64 @denormals() {
  %m = alloca i32, align 8
  call void asm sideeffect "stmxcsr ($0)", "r,~{memory}"(ptr %m)
  %mxcsr = load i32, ptr %m, align 8
  %bit = and i32 %mxcsr, 2
  %out = zext i32 %bit to i64
  ret i64 %out
}
define void @soil(i32 %number) {
entry:
  %m = alloca i32, align 8
  %stack = alloca [16384 x i32], align 64
  br label %fill
fill:
  %k = phi i64 [0, %entry], [%next, %fill]
  %at = getelementptr i32, ptr %stack, i64 %k
  store volatile i32 %number, ptr %at, align 4
  %next = add i64 %k, 1
  %more = icmp ult i64 %next, 16384
  br i1 %more, label %fill, label %done
done:
  call void asm sideeffect "stmxcsr ($0)", "r,~{memory}"(ptr %m)
  %mxcsr = load i32, ptr %m, align 8
  %clear = and i32 %mxcsr, -64
  store i32 %clear, ptr %m, align 8
  call void asm sideeffect "ldmxcsr ($0)", "r,~{memory}"(ptr %m)
  ret void
}
"""
