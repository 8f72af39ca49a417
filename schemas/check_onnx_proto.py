"""Compares a descriptor set built from schemas/onnx.proto with the one inside PyPI's `onnx` package.

Usage: check_onnx_proto.py DESCRIPTOR_SET. Prints every difference and exits 1 if there is one, 3 if there is no `onnx`.
"""

import sys

try:
    from google.protobuf import descriptor_pb2
    from onnx import __version__, onnx_ml_pb2
except ImportError as missing:
    print(f"cannot compare: {missing}")
    sys.exit(3)


def facts_of_enum(prefix, enum):
    path = f"{prefix}{enum.name}"
    yield f"enum {path}"
    for value in enum.value:
        yield f"{path}.{value.name} = {value.number}"


def facts_of_message(prefix, message):
    path = f"{prefix}{message.name}"
    yield f"message {path}"
    for field in message.field:
        label = descriptor_pb2.FieldDescriptorProto.Label.Name(field.label)
        kind = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "-"
        packed = "packed" if field.options.packed else "-"
        yield f"{path}.{field.name} = {field.number} {label} {kind} {field.type_name or '-'} {packed} oneof {oneof}"
    for span in message.reserved_range:
        for number in range(span.start, span.end):
            yield f"{path} reserves {number}"
    for name in message.reserved_name:
        yield f"{path} reserves {name}"
    for enum in message.enum_type:
        yield from facts_of_enum(path + ".", enum)
    for nested in message.nested_type:
        yield from facts_of_message(path + ".", nested)


def facts(file):
    found = {f"syntax {file.syntax or 'proto2'}", f"package {file.package}"}
    for enum in file.enum_type:
        found.update(facts_of_enum("", enum))
    for message in file.message_type:
        found.update(facts_of_message("", message))
    return found


def main():
    ours = descriptor_pb2.FileDescriptorSet()
    with open(sys.argv[1], "rb") as stream:
        ours.ParseFromString(stream.read())
    theirs = descriptor_pb2.FileDescriptorProto()
    onnx_ml_pb2.DESCRIPTOR.CopyToProto(theirs)
    (file,) = [f for f in ours.file if f.package == "onnx"]
    left, right = facts(file), facts(theirs)
    for fact in sorted(left - right):
        print(f"only in schemas/onnx.proto: {fact}")
    for fact in sorted(right - left):
        print(f"only in onnx {__version__}: {fact}")
    print(f"{len(left & right)} facts agree with onnx {__version__}")
    sys.exit(1 if left != right else 0)


main()
