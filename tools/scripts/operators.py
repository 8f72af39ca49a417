"""Writes the table of ONNX Runtime's operators, and of the element types that its CPU kernels take.

    .deps/venv/bin/python tools/scripts/operators.py > tools/model/src/operators/table.txt

hpp-split refuses what is not in this table before it writes a plan, because a session refuses it later with less to say. Run it
again for a newer ONNX Runtime. One line per fact:

    runtime 1.31.1
    ir NEWEST
    domain NAME NEWEST_OPSET
    op DOMAIN NAME [body]                    body: it may be computed by its definition, as a function
    schema SINCE INPUTS OUTPUTS              the name of each one's type, "-" where it is fixed, "+" behind one that repeats
    cpu FIRST LAST|- NAME=TYPE,TYPE ...      kernels for these opsets; types of one name of all kernels together
"""

from collections import defaultdict

import onnx
import onnx.defs
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

NEVER_EXPORTED = {"com.microsoft.nchwc", "com.ms.internal.nhwc"}
NO_LAST = 2**31 - 1


def accepted(domain, version, ir=10):
    """Whether a session accepts a model with these versions."""
    node = helper.make_node("Identity", ["x"], ["y"])
    tensor = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([node], "g", tensor[:1], tensor[1:])
    opsets = [helper.make_opsetid("", 21 if domain else version)]
    opsets += [helper.make_opsetid(domain, version)] if domain else []
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = ir
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return True
    except Exception:
        return False


def newest(works, least):
    """The last of the numbers from `least` on that is accepted."""
    while works(least + 1):
        least += 1
    return least


def element(type_name):
    return type_name.removeprefix("tensor(").removesuffix(")").replace(" ", "")


def has_body(domain, name):
    try:
        schema = onnx.defs.get_schema(name, domain=domain)
    except onnx.defs.SchemaError:
        return False
    return schema.has_function or schema.has_context_dependent_function


def parameters(schema, which):
    names = {constraint.type_param_str for constraint in schema.type_constraints}
    variadic = state.schemadef.OpSchema.FormalParameterOption.Variadic
    words = []
    for parameter in which:
        word = parameter.typeStr if parameter.typeStr in names else "-"
        heterogeneous = parameter.option == variadic and not parameter.isHomogeneous
        words.append(("-" if heterogeneous else word) + ("+" if parameter.option == variadic else ""))
    return ",".join(words) or "."


def main():
    schemas, kernels = defaultdict(list), defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for schema in state.get_all_operator_schema():
        if schema.domain not in NEVER_EXPORTED:
            schemas[schema.domain, schema.name].append(schema)
    for kernel in state.get_all_opkernel_def():
        types = kernels[kernel.domain, kernel.op_name][kernel.version_range]
        for name, allowed in kernel.type_constraints.items():
            types[name].update(element(one) for one in allowed)
    print(f"# Made by tools/scripts/operators.py; its first lines say what these mean.\nruntime {onnxruntime.__version__}")
    print(f"ir {newest(lambda ir: accepted('', 21, ir), 8)}")
    for domain in sorted({domain for domain, _ in schemas}):
        print(f"domain {domain or 'ai.onnx'} {newest(lambda version: accepted(domain, version), 1)}")
    for (domain, name), versions in sorted(schemas.items()):
        print(f"op {domain or 'ai.onnx'} {name}" + (" body" if has_body(domain, name) else ""))
        for schema in sorted(versions, key=lambda schema: schema.since_version):
            print(f"schema {schema.since_version} {parameters(schema, schema.inputs)} {parameters(schema, schema.outputs)}")
        for (first, last), types in sorted(kernels[domain, name].items()):
            words = [f"{name}={','.join(sorted(allowed))}" for name, allowed in sorted(types.items()) if allowed]
            print(" ".join(["cpu", str(first), "-" if last == NO_LAST else str(last), *words]))


main()
