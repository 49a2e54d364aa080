"""Messages about inputs, outputs, flags and names."""

import numpy as np

import onnxfuse
from onnxfuse import backend
from onnxfuse.ir import parse
from onnxfuse.target import by_name
from onnxfuse.verify import ort
from tests.errors.world import World, shows


@shows("E_FLAG", "No such option: --fusion-mod", "", "onnxfuse optimize --help")
def a_flag_that_does_not_exist(w: World) -> str:
    return w.optimize("--fusion-mod", "full")


@shows(
    "E_FLAG",
    "NF_CYCLE cannot be left out",
    "",
    "--skip-fusion-patterns takes: FUSED_ATTENTION, FUSED_PRODUCTS, FUSED_ROW_TAIL, NF_A_DEPTH, NF_COST, "
    "NF_INDEX_MISMATCH, NF_IO_CAP, NF_LOCAL_BUFFER, NF_NODE_CAP, NF_NO_SHARED_DATA, NF_PEAK_MEMORY, NF_SPAN, "
    "NF_TOO_MANY_REDUCES",
)
def a_rule_that_cannot_be_left_out(w: World) -> str:
    w.model()
    return w.optimize("--skip-fusion-patterns", "NF_CYCLE")


@shows("E_FLAG", "cannot read the shape 'x=4'", "", "write name:1,3,224,224")
def a_shape_that_cannot_be_read(w: World) -> str:
    w.model()
    return w.optimize("--test-input-shape", "x=4")


@shows("E_NO_OUTPUT", "no output file given", "", "onnxfuse optimize MODEL OUT, or --dry-run")
def no_output(w: World) -> str:
    w.model()
    return w.cli("optimize", "in.onnx")


@shows("E_NO_NAME", "the model has no node, value or operator 'exponnet'", "", "did you mean: exponent")
def a_node_the_model_does_not_have(w: World) -> str:
    w.model("[exponent] y = Exp(x)")
    return w.cli("explain", "in.onnx", "--node", "exponnet")


@shows("E_NO_NAME", "no group 'xyz'", "", "groups: exp_neg")
def a_group_the_model_does_not_have(w: World) -> str:
    w.model("[exponent] a = Exp(x) y = Neg(a)")
    return w.cli("trace", "in.onnx", "--only", "xyz")


@shows("E_NO_OP", "the op table has no 'Gelo'", "operators that are not in the table stay with onnxruntime, unchanged")
def an_operator_the_table_does_not_have(w: World) -> str:
    return w.cli("ops", "Gelo")


@shows("E_NO_CODE", "there is no code 'NF_NODECAP'", "", "did you mean: NF_NODE_CAP, NF_IO_CAP, NF_MODE")
def a_code_there_is_none_of(w: World) -> str:
    return w.cli("rules", "NF_NODECAP")


@shows(
    "E_STAGE",
    "stage 'generate' cannot be written as an ONNX model",
    "",
    "stages: read, prepare, atomize, fuse, layout, kernelize, plan",
)
def a_stage_that_is_no_model(w: World) -> str:
    w.model()
    return w.cli("trace", "in.onnx", "--export-stage", "generate", "stage.onnx")


@shows("E_IS_DIRECTORY", "output out is a directory", "", "for example out/model.onnx")
def a_folder_as_output(w: World) -> str:
    w.model()
    (w.here / "out").mkdir()
    return w.cli("optimize", "in.onnx", "out")


@shows("E_OUTPUT", "output nowhere/out.onnx: its directory does not exist", "no directory <here>/nowhere")
def an_output_in_no_folder(w: World) -> str:
    w.model()
    return w.cli("optimize", "in.onnx", "nowhere/out.onnx")


@shows("E_OUTPUT", "out.so: the name of the library", "", "the model's name ends in .onnx")
def an_output_named_as_its_library(w: World) -> str:
    w.model()
    return w.cli("optimize", "in.onnx", "out.so")


@shows("E_SAME_FILE", "output in.onnx is the input", "both are <here>/in.onnx", "give another name")
def the_input_as_output(w: World) -> str:
    w.model()
    return w.cli("optimize", "in.onnx", "./in.onnx")


@shows("E_INPUT_NAME", "the model has no input 'X'", "inputs: x: float[4]")
def data_for_an_input_there_is_none_of(w: World) -> str:
    w.model()
    np.savez(w.here / "data.npz", X=np.zeros(4, np.float32))
    return w.optimize("--input-data", "data.npz")


@shows("E_INPUT_SHAPE", "wrong shape for input 'x'", "the model wants x: float[4], given [5]")
def data_of_another_shape(w: World) -> str:
    w.model()
    np.savez(w.here / "data.npz", x=np.zeros(5, np.float32))
    return w.optimize("--input-data", "data.npz")


@shows(
    "E_INPUT_TYPE",
    "wrong element type for input 'x'",
    "the model wants float32, the data is float64",
    "convert the data with astype",
)
def data_of_another_type(w: World) -> str:
    w.model()
    np.savez(w.here / "data.npz", x=np.zeros(4))
    return w.optimize("--input-data", "data.npz")


@shows(
    "E_INPUT_DATA",
    "input data 'data.npz' does not exist",
    "",
    "accepted: x.npz, name:x.npy, a folder with test_data_set_*, input_0.pb, .npy or .npz files",
)
def data_that_are_not_there(w: World) -> str:
    w.model()
    return w.optimize("--input-data", "data.npz")


@shows("E_INPUT_DATA", "'data.npy' does not say which input it is", "inputs: x, z", "write name:file.npy")
def data_that_do_not_say_for_which_input(w: World) -> str:
    w.model("y = Add(x, z)", "(float[4] x, float[4] z) => (float[4] y)")
    np.save(w.here / "data.npy", np.zeros(4, np.float32))
    return w.optimize("--input-data", "data.npy")


@shows("E_INPUT_MISSING", "no data for input z: float[4]", "1 of 2 inputs missing")
def data_for_one_of_two_inputs(w: World) -> str:
    w.model("y = Add(x, z)", "(float[4] x, float[4] z) => (float[4] y)")
    np.save(w.here / "data.npy", np.zeros(4, np.float32))
    return w.optimize("--input-data", "x:data.npy")


@shows(
    "E_INPUT_REFUSED",
    "the original model refuses data.npz",
    "[ONNXRuntimeError] : ...indices element out of data bounds, idx=9 must be within...",
    "not a matter of the optimization: give data the model is made for",
)
def data_the_model_refuses(w: World) -> str:
    w.model("[look] y = Gather(x, i)", "(float[4] x, int64[1] i) => (float[1] y)")
    np.savez(w.here / "data.npz", x=np.zeros(4, np.float32), i=np.array([9]))
    return w.optimize("--input-data", "data.npz")


@shows(
    "E_NO_INPUT",
    "found no input that the original model accepts",
    "[ONNXRuntimeError] : ...input_shape_size == requested_shape_size was false. The input tensor cannot be...",
    "x: float[N] has free dimensions: give them with --test-input-shape x:?",
)
def no_random_data_the_model_accepts(w: World) -> str:
    w.model("a = Constant<value_ints = [5, 7]>() b = Reshape(x, a) y = Exp(b)", "(float[N] x) => (float[a,b] y)")
    return w.optimize("--test-input-shape", "x:4")


@shows("E_OUTPUT_DATA", "'nowhere/y.npz' cannot be written", "[Errno 2] No such file or directory: 'nowhere/y.npz'")
def outputs_that_cannot_be_saved(w: World) -> str:
    w.model()
    return w.cli("run", "in.onnx", "--save-outputs", "nowhere/y.npz")


@shows("E_TARGET", "unknown target CPU 'x86-64-v9'", "", "one of: native, x86-64-v2, x86-64-v3, x86-64-v4, aarch64")
def a_cpu_nobody_knows(w: World) -> str:
    w.model()
    return w.optimize("--target-cpu", "x86-64-v9")


@shows("E_TARGET", "this CPU is older than x86-64-v2", "", "use --target-cpu with another name")
def a_cpu_that_is_too_old(w: World) -> str:
    return w.error(lambda: by_name("native", frozenset({"sse2"})))


@shows("E_TEXT", "line 1: expected string, got 'k'")
def text_of_no_level(w: World) -> str:
    return w.error(lambda: parse.parse("kernel k(%x: f32[4] -> "))


@shows("E_MODEL", "no such model: in.onnx", "current directory: <here>")
def a_session_of_no_model(w: World) -> str:
    return w.error(lambda: onnxfuse.InferenceSession("in.onnx"))


@shows(
    "E_LIBRARY",
    "no library beside in.onnx",
    "expected in.so",
    "copy both files, or load the model with onnxruntime itself (it runs without the kernels)",
)
def a_session_without_library(w: World) -> str:
    w.model()
    return w.error(lambda: onnxfuse.InferenceSession("in.onnx"))


@shows(
    "E_LIBRARY",
    "in.so was not made by onnxfuse",
    "it holds no digest",
    "copy both files, or load the model with onnxruntime itself (it runs without the kernels)",
)
def a_library_of_something_else(w: World) -> str:
    w.model()
    (w.here / "in.so").write_bytes(b"\x7fELF")
    return w.error(lambda: onnxfuse.InferenceSession("in.onnx"))


@shows(
    "E_OPTIONS",
    "these SessionOptions serve another onnxfuse model",
    "<here>/a.so is registered with them already",
    "make new ones",
)
def options_of_another_model(w: World) -> str:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, op in (("a", "Exp"), ("b", "Neg")):
        bundle = onnxfuse.optimize(w.model(f"z = {op}(x) y = Abs(z)"), verify=False)
        bundle.save(w.here / f"{name}.onnx")
    onnxfuse.InferenceSession("a.onnx", options)
    return w.error(lambda: onnxfuse.InferenceSession("b.onnx", options))


@shows("E_DEVICE", "device 'CUDA' is not supported", "only the CPU is")
def a_device_other_than_the_cpu(w: World) -> str:
    return w.error(lambda: backend.prepare(w.model(), "CUDA"))


@shows("E_ORT_VERSION", "this onnxruntime cannot be fed bfloat16 arrays", "", "use 1.20 or newer")
def an_onnxruntime_that_cannot_be_fed_bfloat16(w: World) -> str:
    import ml_dtypes
    import onnxruntime

    w.model("y = Cast<to = 1>(x)", "(bfloat16[4] x) => (float[4] y)")
    session = ort.session(w.here / "in.onnx")
    w.patch.delattr(onnxruntime.OrtValue, "ortvalue_from_numpy_with_onnx_type")
    return w.error(lambda: ort.run(session, {"x": np.zeros(4, ml_dtypes.bfloat16)}))
