"""Messages about a model that cannot be read."""

import os

import numpy as np
import onnx
from onnx import TensorProto, parser

import onnxfuse
from tests.errors.world import World, shows


@shows("E_NO_FILE", "in.onnx does not exist", "current directory: <here>")
def no_such_model(w: World) -> str:
    return w.optimize()


@shows("E_NO_FILE", "<here>/in.onnx does not exist", "current directory: <here>")
def no_such_model_for_the_api(w: World) -> str:
    return w.error(lambda: onnxfuse.optimize(w.here / "in.onnx"))


@shows("E_IS_DIRECTORY", "<here> is a directory", "", "give the .onnx file")
def a_folder_as_model(w: World) -> str:
    return w.error(lambda: onnxfuse.optimize(w.here))


@shows("E_EMPTY", "in.onnx: empty, not an ONNX model", "0 bytes", "was the file written completely?")
def an_empty_file(w: World) -> str:
    (w.here / "in.onnx").touch()
    return w.optimize()


@shows(
    "E_PARSE",
    "in.onnx: not an ONNX model, or a truncated one",
    "31 bytes that are not a ModelProto",
    "was the file copied or downloaded completely?",
)
def a_truncated_file(w: World) -> str:
    data = w.model().SerializeToString()
    (w.here / "in.onnx").write_bytes(data[: len(data) // 2])
    return w.optimize()


@shows(
    "E_PARSE",
    "the model has text that is not UTF-8: ValueInfoProto.name",
    "it is 'n\\xff\\xfee_of_y'",
    "the exporter wrote it in another encoding, or the file is damaged",
)
def text_that_is_not_utf8(w: World) -> str:
    data = w.model("name_of_y = Exp(x)", "(float[4] x) => (float[4] name_of_y)").SerializeToString()
    (w.here / "in.onnx").write_bytes(data.replace(b"name_of_y", b"n\xff\xfee_of_y"))
    return w.optimize()


@shows(
    "E_NOT_MODEL",
    "in.onnx: not an ONNX model",
    "graph: no, ir_version: 0",
    "a whole ModelProto is needed: a tensor or a graph alone is none",
)
def a_tensor_instead_of_a_model(w: World) -> str:
    (w.here / "in.onnx").write_bytes(onnx.ModelProto(producer_name="me").SerializeToString())
    return w.optimize()


@shows(
    "E_TOO_LARGE",
    "in.onnx: larger than protobuf allows",
    "2147483648 bytes > 2147483647",
    "store the weights as external data",
)
def a_file_protobuf_cannot_hold(w: World) -> str:
    with open(w.here / "in.onnx", "wb") as f:
        f.truncate(1 << 31)
    return w.optimize()


@shows(
    "E_INVALID_MODEL",
    "the model is not valid ONNX",
    "node 'LeakyRelu_0' (LeakyRelu): Mismatched attribute type in 'LeakyRelu_0 : alpha'. "
    "Expected: 'FLOAT', actual: 'INT'",
    "onnx.checker.check_model says it as well",
)
def an_attribute_of_the_wrong_type(w: World) -> str:
    w.model("y = LeakyRelu<alpha = 1>(x)")
    return w.optimize()


@shows(
    "E_INVALID_MODEL",
    "the model is not valid ONNX",
    "node 'axes' (Unsqueeze): Node(axes) with schema(::Unsqueeze:13) has input size 1 not in range [min=2, max=2].",
    "the node is written as in opset 12, the model imports opset 17: one of the two is wrong",
)
def a_node_of_another_opset(w: World) -> str:
    w.model("[axes] y = Unsqueeze<axes = [0]>(x)", "(float[4] x) => (float[1,4] y)")
    return w.optimize()


@shows(
    "E_INVALID_MODEL",
    "the model is not valid ONNX",
    "node 'inner' (Cast): Required attribute 'to' is missing.",
    "onnx.checker.check_model says it as well",
)
def a_branch_that_is_not_valid(w: World) -> str:
    branches = "then_branch = g () => (t) { [inner] t = Cast(x) }, else_branch = h () => (e) { e = Exp(x) }"
    w.model(f"y = If (c) <{branches}>", "(float[4] x, bool c) => (float[4] y)")
    return w.optimize()


@shows(
    "E_INVALID_MODEL",
    "the twice node without a name that makes 'y' gives function f::twice too many arguments",
    "2 inputs of 1, 1 outputs of 1",
    "the call and the function were exported from different versions of it",
)
def a_function_called_with_too_much(w: World) -> str:
    head = '<ir_version: 8, opset_import: ["": 17, "f": 1]>'
    body = "twice (a) => (b) { b = Add(a, a) }"
    w.save(
        parser.parse_model(
            f"{head} g (float[4] x) => (float[4] y) {{ y = f.twice(x, x) }} "
            f'<domain: "f", opset_import: ["": 17]> {body}'
        )
    )
    return w.optimize()


@shows("E_CYCLE", "the graph has a cycle", "2 nodes: second -> first -> second", "no node may need its own result")
def nodes_in_a_circle(w: World) -> str:
    w.model("[first] a = Add(x, b) [second] b = Neg(a) y = Exp(b)")
    return w.optimize()


@shows("E_CYCLE", "local functions call each other in a circle", "among f::ping, f::pong", "remove the cycle")
def functions_in_a_circle(w: World) -> str:
    head = '<ir_version: 8, opset_import: ["": 17, "f": 1]>'
    function = '<domain: "f", opset_import: ["": 17, "f": 1]>'
    w.save(
        parser.parse_model(
            f"{head} g (float[4] x) => (float[4] y) {{ y = f.ping(x) }} "
            f"{function} ping (a) => (b) {{ b = f.pong(a) }} {function} pong (a) => (b) {{ b = f.ping(a) }}"
        )
    )
    return w.optimize()


@shows(
    "E_DUPLICATE_VALUE",
    "value 'a' is defined twice",
    "by node 'first' (Exp) and by node 'second' (Neg)",
    "rename one",
)
def a_value_made_twice(w: World) -> str:
    w.model("[first] a = Exp(x) [second] a = Neg(x) y = Abs(a)")
    return w.optimize()


@shows(
    "E_UNDEFINED_VALUE",
    "node 'sum' (Add) reads 'b', which nothing defines",
    "input 1 of 2",
    "a node, an initializer or a graph input of this name is missing",
)
def a_value_nobody_makes(w: World) -> str:
    w.model("[sum] y = Add(x, b)")
    return w.optimize()


@shows(
    "E_UNDEFINED_VALUE",
    "graph output 'y' is not made by any node",
    "",
    "a node, an initializer or a graph input of this name is missing",
)
def an_output_nobody_makes(w: World) -> str:
    w.model("z = Exp(x)")
    return w.optimize()


@shows(
    "E_OPSET_IMPORT",
    "node 'mine' (Exp) is of domain 'com.example', which is not imported",
    "opset_import has ['']",
    "add the domain to opset_import",
)
def a_domain_that_is_not_imported(w: World) -> str:
    proto = w.model("[mine] y = Exp(x)")
    proto.graph.node[0].domain = "com.example"
    w.save(proto)
    return w.optimize()


@shows(
    "E_OPSET_IMPORT",
    "domain 'ai.onnx' is imported twice",
    "versions 17 and 13",
    "keep the one the nodes are written for",
)
def one_domain_in_two_versions(w: World) -> str:
    proto = w.model()
    proto.opset_import.add(domain="ai.onnx", version=13)
    w.save(proto)
    return w.optimize()


@shows(
    "E_UNKNOWN_OP",
    "ops that do not exist in the default domain: Gelu (node 'act', new in opset 20)",
    "the model imports opset 17",
    "custom ops need a domain of their own; standard ones an opset_import that has them",
)
def an_operator_of_a_newer_opset(w: World) -> str:
    w.model("[act] y = Gelu(x)", opset=17)
    return w.optimize()


@shows(
    "E_TENSOR",
    "tensor 'w': data does not match its dimensions",
    "dims [5] FLOAT need 20 bytes, found 16",
    "the file is damaged, or was written by something with a bug",
)
def data_that_do_not_fit_the_dimensions(w: World) -> str:
    proto = w.model("y = Add(x, w)", weights={"w": np.zeros(4, np.float32)})
    proto.graph.initializer[0].dims[0] = 5
    w.save(proto)
    return w.optimize()


@shows(
    "E_TENSOR",
    "tensor 'w' has a negative dimension",
    "dims [-4]",
    "the file is damaged, or was written by something with a bug",
)
def a_negative_dimension(w: World) -> str:
    proto = w.model("y = Add(x, w)")
    proto.graph.initializer.append(TensorProto(name="w", data_type=1, dims=[-4], raw_data=b""))
    w.save(proto)
    return w.optimize()


def _external(w: World, **info: str) -> None:
    proto = w.model("y = Add(x, w)")
    tensor = proto.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in info.items():
        tensor.external_data.add(key=key, value=value)
    w.save(proto)


@shows(
    "E_EXTERNAL_MISSING",
    "external data of tensor 'w' is missing",
    "no file <here>/w.bin",
    "copy it beside the model",
)
def a_data_file_that_is_missing(w: World) -> str:
    _external(w, location="w.bin")
    return w.optimize()


@shows(
    "E_EXTERNAL_MISSING",
    "external data of tensor 'w' cannot be found",
    "location 'w.bin', but the model was given without a directory",
    "give the path of the model file",
)
def external_data_of_a_model_without_a_place(w: World) -> str:
    _external(w, location="w.bin")
    return w.error(lambda: onnxfuse.optimize(onnx.load("in.onnx", load_external_data=False)))


@shows(
    "E_EXTERNAL_PATH",
    "external data of tensor 'w' lies outside the model's directory",
    "location '../w.bin' leads to <here>/../w.bin, the model is in <here>",
    "move the data file beside the model",
)
def a_data_file_outside_the_directory(w: World) -> str:
    _external(w, location="../w.bin")
    return w.optimize()


@shows(
    "E_EXTERNAL_PATH",
    "external data of tensor 'w' lies outside the model's directory",
    "location 'w.bin' leads to /dev/zero, the model is in <here>",
    "move the data file beside the model",
)
def a_link_out_of_the_directory(w: World) -> str:
    os.symlink("/dev/zero", w.here / "w.bin")
    _external(w, location="w.bin")
    return w.optimize()


@shows(
    "E_EXTERNAL_SIZE",
    "external data of tensor 'w' does not fit its file",
    "w.bin: offset 8 + 16 bytes of 20; dims [4] FLOAT need 16",
    "the data file is truncated or belongs to another model",
)
def a_data_file_that_is_too_short(w: World) -> str:
    (w.here / "w.bin").write_bytes(bytes(20))
    _external(w, location="w.bin", offset="8", length="16")
    return w.optimize()


@shows(
    "E_EXTERNAL_SIZE",
    "offset or length of the external data of tensor 'w' is no number",
    "offset 'eight', length ''",
    "both are decimal numbers of bytes: export the model again",
)
def an_offset_that_is_no_number(w: World) -> str:
    (w.here / "w.bin").write_bytes(bytes(20))
    _external(w, location="w.bin", offset="eight")
    return w.optimize()


@shows(
    "E_ORT_LOAD",
    "onnxruntime refuses to load 'in.onnx'",
    "[ONNXRuntimeError] : ...com.example:Exp...",
    "is a library of custom ops missing (--custom-op-library), or a newer onnxruntime? --no-verify does without it",
)
def a_model_onnxruntime_refuses(w: World) -> str:
    proto = w.model("[mine] y = Exp(x)")
    proto.graph.node[0].domain = "com.example"
    proto.opset_import.add(domain="com.example", version=1)
    w.save(proto)
    return w.optimize()


@shows(
    "E_DIM_PARAM",
    "--dim-param bach=1: no input has a dimension 'bach'",
    "symbolic dimensions of the inputs: T, batch",
)
def a_symbol_no_input_has(w: World) -> str:
    w.model("y = Exp(x)", "(float[batch,T] x) => (float[a,b] y)")
    return w.optimize("--dim-param", "bach=1")


@shows("E_DIM_PARAM", "--dim-param batch=0: a dimension is at least 1", "got 0")
def a_symbol_of_size_zero(w: World) -> str:
    w.model("y = Exp(x)", "(float[batch,T] x) => (float[a,b] y)")
    return w.optimize("--dim-param", "batch=0")


@shows("E_INPUT_NAME", "--overwrite-input-shape images:1,3: no input is called 'images'", "inputs: x")
def a_shape_for_no_input(w: World) -> str:
    w.model("y = Exp(x)", "(float[batch,T] x) => (float[a,b] y)")
    return w.optimize("--overwrite-input-shape", "images:1,3")


@shows(
    "E_INPUT_SHAPE",
    "--overwrite-input-shape x:1,3,4: input 'x' has another rank",
    "it has 2 dimensions, 3 were given",
)
def a_shape_of_another_rank(w: World) -> str:
    w.model("y = Exp(x)", "(float[batch,T] x) => (float[a,b] y)")
    return w.optimize("--overwrite-input-shape", "x:1,3,4")


@shows("E_INPUT_SHAPE", "--overwrite-input-shape x:5: axis 0 is fixed in the model", "it is 4, 5 was given")
def a_shape_the_model_fixes(w: World) -> str:
    w.model()
    return w.optimize("--overwrite-input-shape", "x:5")
