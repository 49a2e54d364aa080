"""Numbers both sides agree on: slots of OrtApi, functions of OrtCustomOp, and the records the glue reads.

The C API is append-only, so slots are constants; everything used here exists since 1.17 (API 17).
"""

ENTRY = "RegisterCustomOps"
DIGEST = "onnxfuse_digest"
DIGEST_MARK = "onnxfuse-digest:"
EXPORTS = (ENTRY, DIGEST)
DOMAIN = "onnxfuse"
API_VERSION = 17
GENERAL = "general"  # part of the symbol names of the general variant
MESSAGE_BYTES = 1536  # buffer for the text of a status
TEXT_LIMIT = 1000  # constant parts of a message are cut to this at compile time
ALIGN = 64  # of scratch and packed buffers

# OrtErrorCode
FAIL, INVALID_ARGUMENT, NOT_IMPLEMENTED = 1, 2, 9

# Slots of OrtApi, in pointer-sized words.
SLOT = {
    "CreateStatus": 0,
    "CreateCustomOpDomain": 26,
    "CustomOpDomain_Add": 27,
    "AddCustomOpDomain": 28,
    "GetTensorMutableData": 51,
    "GetDimensionsCount": 61,
    "GetDimensions": 62,
    "GetTensorTypeAndShape": 65,
    "AllocatorAlloc": 75,
    "AllocatorFree": 76,
    "AllocatorGetInfo": 77,
    "GetAllocatorWithDefaultOptions": 78,
    "KernelContext_GetInput": 90,
    "KernelContext_GetOutput": 91,
    "ReleaseStatus": 93,
    "ReleaseTensorTypeAndShapeInfo": 99,
    "ReleaseCustomOpDomain": 101,
    "ReleaseAllocator": 132,
    "KernelInfoGetConstantInput_tensor": 249,
    "KernelContext_GetAllocator": 253,
    "KernelContext_ParallelFor": 274,
}

# OrtCustomOp: a version word, then these function pointers.
OP_FUNCTIONS = (
    "CreateKernel", "GetName", "GetExecutionProviderType", "GetInputType", "GetInputTypeCount", "GetOutputType",
    "GetOutputTypeCount", "KernelCompute", "KernelDestroy", "GetInputCharacteristic", "GetOutputCharacteristic",
    "GetInputMemoryType", "GetVariadicInputMinArity", "GetVariadicInputHomogeneity", "GetVariadicOutputMinArity",
    "GetVariadicOutputHomogeneity", "CreateKernelV2", "KernelComputeV2", "InferOutputShapeFn", "GetStartVersion",
    "GetEndVersion", "GetMayInplace", "ReleaseMayInplace", "GetAliasMap", "ReleaseAliasMap",
)  # fmt: skip
DESCRIPTOR_WORD = 1 + len(OP_FUNCTIONS)  # our pointer follows the OrtCustomOp

# Records of the glue: words of 8 bytes each, pointers or i64.
DESCRIPTOR = (
    "name", "title", "inputs", "outputs", "input_types", "output_types", "input_ranks", "output_ranks", "static_dims",
    "const_flags", "first_dim", "env_words", "dims", "errors", "fast", "general",
)  # fmt: skip
VARIANT = ("phases", "tasks", "run", "scratch", "packs", "packed_bytes", "pack")
FAULT = ("text", "show_expected")
STATE = ("descriptor", "api", "packed", "packed_raw")  # then, of each input, where its data are if they are known
CALL = ("run", "env", "bufs", "packed", "scratch")
