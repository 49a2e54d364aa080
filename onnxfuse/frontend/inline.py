"""Local functions are inlined: ModelProto -> the same ModelProto without them.

A function that imports an opset version other than the model's stays (onnxruntime reads its body in the model's opset,
so its meaning is the runtime's business), and so do functions whose attributes hold graphs or that are too large when
expanded. A call of a function that stays is a foreign op. Names of values and nodes inside a body are made unique;
outputs keep the caller's names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx

from onnxfuse.errors import UsageError
from onnxfuse.frontend.protos import all_graphs, domain_of, imports_of, subgraphs, told
from onnxfuse.ir.graph import fresh_name

MOST_NODES = 1_000_000  # a model of functions that call functions may be this large when all are expanded
MOST_DEPTH = 30  # graphs within graphs: a protobuf holds 100 messages within each other, a graph takes three
Key = tuple[str, str, str]  # domain, name, overload


def inline_functions(model: onnx.ModelProto) -> None:
    """Expand every call of a local function, in place; functions without callers are dropped."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    if not functions:
        return
    _refuse_cycles(functions)
    imports = imports_of(model.opset_import)
    sizes = extents(model.functions)
    chosen = {k: f for k, f in functions.items() if _can_inline(f, imports) and _fits(sizes[k])}
    if not _fits(_whole(model.graph, {k: sizes[k] for k in chosen})):
        chosen = {}
    for f in chosen.values():
        _import(model, f, imports)
    values, nodes = _names(model)
    for graph in list(all_graphs(model.graph)):
        _inline_graph(graph, chosen, values, nodes)
    _drop_unused(model, functions)


def _key(node: onnx.NodeProto) -> Key:
    return (node.domain, node.op_type, node.overload)


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a function is when everything it calls is expanded."""

    nodes: int
    depth: int  # of graphs within graphs


def _calls(function: onnx.FunctionProto) -> list[tuple[Key, int]]:
    """What every node of a function calls, and how deep in graphs it stands."""
    found = [(_key(n), 0) for n in function.node]
    stack = [(g, 1) for n in function.node for g in subgraphs(n)]
    while stack:
        graph, depth = stack.pop()
        found += [(_key(n), depth) for n in graph.node]
        stack += [(g, depth + 1) for n in graph.node for g in subgraphs(n)]
    return found


def _callees_first(calls: Mapping[Key, Collection[Key]]) -> list[Key]:
    """Functions after all they call; those that are in a circle, and those that call them, are left out."""
    waits = {k: {c for c in called if c in calls} for k, called in calls.items()}
    callers: dict[Key, list[Key]] = {k: [] for k in calls}
    for k, called in waits.items():
        for c in called:
            callers[c].append(k)
    order = [k for k, called in waits.items() if not called]
    for k in order:  # the list grows meanwhile
        for caller in callers[k]:
            waits[caller].discard(k)
            if not waits[caller]:
                order.append(caller)
    return order


def _refuse_cycles(functions: Mapping[Key, onnx.FunctionProto]) -> None:
    calls = {k: {c for c, _ in _calls(f) if c in functions} for k, f in functions.items()}
    remaining = set(functions).difference(_callees_first(calls))
    called: dict[Key, set[Key]] = {k: set() for k in remaining}
    for k in remaining:
        for c in calls[k] & remaining:
            called[c].add(k)
    remaining.difference_update(_callees_first(called))  # they only call what is in a circle
    if remaining:
        names = ", ".join(sorted(f"{d}::{n}" for d, n, _ in remaining))
        raise UsageError("E_CYCLE", "local functions call each other in a circle", f"among {names}", "remove the cycle")


def extents(functions: Iterable[onnx.FunctionProto]) -> dict[Key, Extent]:
    """Of each function when everything it calls is expanded. Functions in a circle have none."""
    calls = {(f.domain, f.name, f.overload): _calls(f) for f in functions}
    found: dict[Key, Extent] = {}
    one = Extent(1, 0)
    for k in _callees_first({k: {c for c, _ in called} for k, called in calls.items()}):
        nodes = sum(found.get(c, one).nodes for c, _ in calls[k])
        found[k] = Extent(nodes, max((d + found.get(c, one).depth for c, d in calls[k]), default=0))
    return found


def too_large(functions: Iterable[onnx.FunctionProto]) -> bool:
    """One of them would not fit into a model when it is expanded."""
    return any(not _fits(e) for e in extents(functions).values())


def _fits(extent: Extent) -> bool:
    return extent.nodes <= MOST_NODES and extent.depth <= MOST_DEPTH


def _whole(graph: onnx.GraphProto, found: Mapping[Key, Extent]) -> Extent:
    """Of a graph in which these functions are expanded, and nothing else is counted."""
    nodes = depth = 0
    stack = [(graph, 0)]
    while stack:
        g, at = stack.pop()
        here = [found[_key(n)] for n in g.node if _key(n) in found]
        nodes += sum(e.nodes for e in here)
        depth = max([depth, *(at + e.depth for e in here)])
        stack += [(inner, at + 1) for n in g.node for inner in subgraphs(n)]
    return Extent(nodes, depth)


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
            f"{told(call)} gives function {function.domain}::{function.name} too many arguments",
            f"{len(call.input)} inputs of {len(function.input)}, {len(call.output)} outputs of {len(function.output)}",
            "the call and the function were exported from different versions of it",
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
