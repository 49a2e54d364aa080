"""Local functions are inlined: ModelProto -> the same ModelProto without them.

A function that imports an opset version other than the model's stays (onnxruntime reads its body in the model's opset,
so its meaning is the runtime's business), and so do functions whose attributes hold graphs or that are too large when
expanded. A call of a function that stays is a foreign op. Names of values and nodes inside a body are made unique;
outputs keep the caller's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from onnxfuse.errors import UsageError
from onnxfuse.frontend.protos import all_graphs, domain_of, imports_of, subgraphs
from onnxfuse.ir.graph import fresh_name

MOST_NODES = 1_000_000  # a model of functions that call functions may be this large when all are expanded
Key = tuple[str, str, str]  # domain, name, overload


def inline_functions(model: onnx.ModelProto) -> None:
    """Expand every call of a local function, in place; functions without callers are dropped."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    if not functions:
        return
    _refuse_cycles(functions)
    imports = imports_of(model.opset_import)
    sizes = expanded_sizes(model.functions)
    chosen = {k: f for k, f in functions.items() if _can_inline(f, imports) and sizes[k] <= MOST_NODES}
    if sum(sizes.get(_key(n), 1) for g in all_graphs(model.graph) for n in g.node if _key(n) in chosen) > MOST_NODES:
        chosen = {}
    for f in chosen.values():
        _import(model, f, imports)
    values, nodes = _names(model)
    for graph in list(all_graphs(model.graph)):
        _inline_graph(graph, chosen, values, nodes)
    _drop_unused(model, functions)


def _key(node: onnx.NodeProto) -> Key:
    return (node.domain, node.op_type, node.overload)


def _refuse_cycles(functions: Mapping[Key, onnx.FunctionProto]) -> None:
    calls = {k: [_key(n) for n in f.node if _key(n) in functions] for k, f in functions.items()}
    done: set[Key] = set()
    remaining = set(functions)
    while ready := [k for k in functions if k in remaining and all(c in done for c in calls[k])]:
        done.update(ready)
        remaining.difference_update(ready)
    if remaining:
        names = ", ".join(sorted(f"{d}::{n}" for d, n, _ in remaining))
        raise UsageError("E_CYCLE", "local functions call each other in a circle", f"among {names}", "remove the cycle")


def expanded_sizes(functions: Iterable[onnx.FunctionProto]) -> dict[Key, int]:
    """Nodes of each function when everything it calls is expanded. Functions in a circle have no size."""
    calls = {(f.domain, f.name, f.overload): [_key(n) for n in f.node] for f in functions}
    sizes: dict[Key, int] = {}
    while ready := [k for k in calls if k not in sizes and all(c in sizes or c not in calls for c in calls[k])]:
        for k in ready:
            sizes[k] = sum(sizes.get(c, 1) for c in calls[k])
    return sizes


def _can_inline(function: onnx.FunctionProto, imports: Mapping[str, int]) -> bool:
    same = all(imports.get(d, v) == v for d, v in imports_of(function.opset_import).items())
    return same and not any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in _refs(function))


def _refs(function: onnx.FunctionProto) -> list[onnx.AttributeProto]:
    return [a for n in function.node for a in n.attribute if a.ref_attr_name]


def _import(model: onnx.ModelProto, function: onnx.FunctionProto, imports: dict[str, int]) -> None:
    for domain, version in imports_of(function.opset_import).items():
        if domain not in imports:
            imports[domain] = version
            model.opset_import.add(domain=domain, version=version)


def _names(model: onnx.ModelProto) -> tuple[set[str], set[str]]:
    """Every value name and every node name in use, at any depth."""
    values: set[str] = set()
    nodes: set[str] = set()
    for graph in all_graphs(model.graph):
        values |= {i.name for i in graph.input} | {o.name for o in graph.output} | {t.name for t in graph.initializer}
        values |= {t.values.name for t in graph.sparse_initializer}
        for node in graph.node:
            values.update(node.input)
            values.update(node.output)
            nodes.add(node.name)
    return values, nodes


def _inline_graph(
    graph: onnx.GraphProto, functions: Mapping[Key, onnx.FunctionProto], values: set[str], nodes: set[str]
) -> None:
    if not any(_key(n) in functions for n in graph.node):
        return
    pending = list(reversed(graph.node))
    out: list[onnx.NodeProto] = []
    while pending:
        node = pending.pop()
        function = functions.get(_key(node))
        if function is None:
            out.append(node)
            continue
        body = _expand(node, function, values, nodes)
        for n in body:
            for g in subgraphs(n):
                for inner in list(all_graphs(g)):
                    _inline_graph(inner, functions, values, nodes)
        pending.extend(reversed(body))
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in out]
    del graph.node[:]
    graph.node.extend(kept)


def _expand(
    call: onnx.NodeProto, function: onnx.FunctionProto, values: set[str], nodes: set[str]
) -> list[onnx.NodeProto]:
    """The body of `function` under the names of `call`."""
    if len(call.input) > len(function.input) or len(call.output) > len(function.output):
        raise UsageError(
            "E_INVALID_MODEL",
            f"node {call.name!r} calls function {function.domain}::{function.name} with too many arguments",
            f"{len(call.input)} inputs of {len(function.input)}, {len(call.output)} outputs of {len(function.output)}",
        )
    given = {a.name: a for a in call.attribute}
    attrs = {a.name: given.get(a.name, a) for a in function.attribute_proto}
    attrs |= {name: given[name] for name in function.attribute if name in given}
    rename = {name: (call.input[k] if k < len(call.input) else "") for k, name in enumerate(function.input)}
    rename[""] = ""
    aliases: list[onnx.NodeProto] = []
    made = {name for n in function.node for name in n.output}
    for inner, outer in zip(function.output, call.output, strict=False):
        if outer == "":
            continue
        if inner in made and inner not in rename:
            rename[inner] = outer
        else:  # an input handed through, or one value under two names
            aliases.append(onnx.NodeProto(op_type="Identity", input=[rename.get(inner, inner)], output=[outer]))
    body = [_copy(n, rename, attrs, values) for n in function.node]
    for n in body:
        base = n.name or n.op_type
        prefix = f"{call.name}/" if call.name and function.domain != "onnxfuse" else ""
        n.name = fresh_name(prefix + base, nodes)
    return body + aliases


def _copy(
    node: onnx.NodeProto, rename: dict[str, str], attrs: Mapping[str, onnx.AttributeProto], values: set[str]
) -> onnx.NodeProto:
    """A copy of a body node under new names, attribute references resolved. `rename` learns the outputs."""
    new = onnx.NodeProto()
    new.CopyFrom(node)
    del new.attribute[:]
    for attr in node.attribute:
        if not attr.ref_attr_name:
            new.attribute.add().CopyFrom(attr)
        elif attr.ref_attr_name in attrs:
            value = new.attribute.add()
            value.CopyFrom(attrs[attr.ref_attr_name])
            value.name = attr.name
    new.input[:] = [_renamed(name, rename, values) for name in node.input]
    new.output[:] = [_renamed(name, rename, values) for name in node.output]
    for graph in subgraphs(new):
        _rename_graph(graph, rename, attrs, values)
    return new


def _renamed(name: str, rename: dict[str, str], values: set[str]) -> str:
    if name not in rename:
        rename[name] = fresh_name(name, values)
    return rename[name]


def _rename_graph(
    graph: onnx.GraphProto, outer: Mapping[str, str], attrs: Mapping[str, onnx.AttributeProto], values: set[str]
) -> None:
    """Everything a subgraph of a body defines gets a fresh name too: bodies are inlined many times."""
    rename = dict(outer)
    for item in (*graph.input, *graph.initializer):
        rename[item.name] = item.name = fresh_name(item.name, values)
    for sparse in graph.sparse_initializer:
        rename[sparse.values.name] = sparse.values.name = fresh_name(sparse.values.name, values)
    for node in graph.node:
        rename.update({name: fresh_name(name, values) for name in node.output if name})
    copies = [_copy(n, rename, attrs, values) for n in graph.node]
    del graph.node[:]
    graph.node.extend(copies)
    del graph.value_info[:]
    for out in graph.output:
        out.name = _renamed(out.name, rename, values)


def _drop_unused(model: onnx.ModelProto, functions: Mapping[Key, onnx.FunctionProto]) -> None:
    used = {_key(n) for g in all_graphs(model.graph) for n in g.node}
    pending = [k for k in functions if k in used]
    alive = set(pending)
    while pending:
        function = functions[pending.pop()]
        bodies = [g for f in function.node for s in subgraphs(f) for g in all_graphs(s)]
        inner = [*function.node, *(n for g in bodies for n in g.node)]
        new = {_key(n) for n in inner if _key(n) in functions} - alive
        alive |= new
        pending.extend(new)
    kept = [f for f in model.functions if (f.domain, f.name, f.overload) in alive]
    gone = {domain_of(d) for d, _, _ in functions} - {domain_of(f.domain) for f in kept}
    copies = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in kept]
    del model.functions[:]
    model.functions.extend(copies)
    domains = {domain_of(n.domain) for g in all_graphs(model.graph) for n in g.node}
    domains |= {domain_of(d) for f in kept for d in imports_of(f.opset_import)}
    imports = [i for i in model.opset_import if domain_of(i.domain) not in gone - domains]
    copies_of_imports = [onnx.OperatorSetIdProto.FromString(i.SerializeToString()) for i in imports]
    del model.opset_import[:]
    model.opset_import.extend(copies_of_imports)
