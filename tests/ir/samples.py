"""Texts of every level, as the printer writes them."""

SOFTMAX = """
loops "softmax"(%x: f32[N,256]) -> (%y) {
  %m[i<N]: f32 = max[r<256] init -inf acc f32: %x[i, r] from "Softmax_3"
  %e[i<N, j<256]: f32 = exp(%x[i, j] - %m[i]) from "Softmax_3"
  %s[i<N]: f32 = add[r<256] init 0.0 acc f32: %e[i, r] from "Softmax_3"
  %y[i<N, j<256]: f32 = %e[i, j] / %s[i] from "Softmax_3"
}
"""

MEAN_PAD_CAST = """
loops "mean"(%x: f16[N,3,8], %k: i64[4]) -> (%m, %p, %g, %n) {
  const %w: f32[3] = {1.0, 0.5, -0.0}
  %m[i<N, c<3]: f16 = add[r<8] init 0.0 acc f32: f32(%x[i, c, r]) -> f16(acc * 0.125 * %w[c])
  opaque (%n: i64[2,K], -) = NonZero@13(%k) name "nz" from "nz" refused UN_OPAQUE "output shape depends on data"
  %p[i<N, j<10]: f16 = where(1 <= j & j < 9, %x[i, 0, j - 1], 0.0:f16)
  %g[i<K]: i32 = i32(%k[%n[0, i]] * (i // 2 + N % 3))
}
"""

MATMUL = """
loops "matmul"(%a: f32[N,64], %b: f32[64,32]) -> (%y, %any) {
  %c[i<N, j<32]: f32 = add[k<64] init 0.0 acc f32: %a[i, k] * %b[k, j]
  %y[i<N, j<32]: f32 = max(%c[i, j], 0.0)
  %any[]: bool = or[i<N, j<32] init false acc bool: 0.0 < %y[i, j]
}
"""

LOOPS = [SOFTMAX, MEAN_PAD_CAST, MATMUL]

GRAPH = """
graph "main"(%x: f32[N,4], %d: f32[4]) -> (%z, %u) opset 17 imports {"": 17, "ai.onnx.ml": 3} {
  const %w: f32[4] = {1.0, 2.0, inf, nan}
  const %big: f32[64] = #0123456789ab
  const %b: bool[2] = {true, false}
  default %d = {0.0, 0.0, 0.0, 0.0}
  (%y: f32[N,4]) = Add@14(%x, %w) name "add" from "Add_1"
  (%z: f32[N,4], -) = Dropout@13(%y, -, -) {seed=1} name "drop" from "Drop_2", "Drop_3"
  (%u: ?) = ai.onnx.ml::Strange@3(%y) {a=1.5, b=[1, 2], c="s", d=foreign} captures(%d) name "odd"
}
"""

PARTITION = (
    "partition {\n"
    + SOFTMAX.strip()
    + """
group 0 reduce anchor %m (%x) -> (%m) { %m }
group 1 injective (%x, %m) -> (%y) { %e, %s, %y }
layout %y "channels_last"
decision A "m" "e" vertical refused NF_KIND limit=3 why="reduce"
decision B "e" "s" vertical fused FU_SAVES bytes=1024 share=0.5
}
"""
)

KERNELS = [
    """
kernel "pointwise"(%x: f32[N,4], %w: f32[4]) -> (%y: f32[N,4]) outer [i<N, j<4] from "Add_1", "Relu_2" {
  dim N = shape(%x, 0)
  stage [] {
    %y[i, j] = max(%x[i, j] + %w[j], 0.0)
  }
}
""",
    """
kernel "softmax"(%x: f32[2 * N + 1,256]) -> (%y: f32[2 * N + 1,256]) outer [i<2 * N + 1] {
  dim N = shape(%x, 0) - 1 / 2
  check shape(%x, 0) == 2 * N + 1
  local %m: f32[]
  local %e: f32[256]
  local %s: f32[]
  stage [] max[r<256] init -inf acc f32: %x[i, r] {
    %m[] = acc
  }
  stage [j<256] {
    %e[j] = exp(%x[i, j] - %m[])
  }
  stage [] add[r<256] init 0.0 acc f32: %e[r] {
    %s[] = acc
  }
  stage [j<256] {
    %y[i, j] = %e[j] / %s[]
  }
}
""".replace("2 * N", "N * 2"),
    """
kernel "gemm"(%a: f32[N,64], const %b: f32[64,32], %c: f32[M,32]) -> (%y: f32[N,32]) outer [i<N, j<32] {
  dim N = shape(%a, 0)
  dim M = shape(%c, 0)
  maybe (N) == (M)
  local %t: f32[]
  stage [] add[k<64] init 0.0 acc f32: %a[i, k] * %b[k, j] {
    %t[] = acc
  }
  stage [] {
    %y[i, j] = %t[] + %c[bcast(i, M), j]
  }
}
""",
]
