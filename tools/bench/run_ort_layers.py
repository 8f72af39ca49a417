"""Decodes with ONNX Runtime alone, its layers assigned to a GPU and the host within one session; prints times as JSON.

    run_ort_layers.py MODEL.onnx cuda|webgpu GPU_NAMES CPU_NAMES PROMPT NEW CAPACITY THREADS HEADS HEAD_SIZE

GPU_NAMES and CPU_NAMES are comma-separated parts of node names, for ONNX Runtime's `session.name_based_layer_assignment`. The script
calls the library of ORT_DYLIB_PATH through its C interface, so that no Python package is needed. The cache of each layer
is in the memory that ONNX Runtime prefers and is written in place; the tokens are given, none is sampled.
"""

import ctypes
import faulthandler
import json
import os
import sys
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p

# The version of the interface, and the indices of its functions in a table that only grows at its end.
VERSION = 24
AT = {
    "GetErrorMessage": 2, "CreateEnv": 3, "CreateSession": 7, "CreateSessionOptions": 10, "SetIntraOpNumThreads": 24,
    "SessionGetInputCount": 30, "SessionGetInputTypeInfo": 33, "SessionGetInputName": 36, "CreateTensorAsOrtValue": 48,
    "CreateTensorWithDataAsOrtValue": 49, "CastTypeInfoToTensorInfo": 55, "GetTensorElementType": 60, "CreateCpuMemoryInfo": 69,
    "GetAllocatorWithDefaultOptions": 78, "ReleaseValue": 96, "AddSessionConfigEntry": 130, "CreateAllocator": 131,
    "RunWithBinding": 133, "CreateIoBinding": 134, "BindInput": 136, "BindOutput": 137, "BindOutputToDevice": 138,
    "SynchronizeBoundOutputs": 203, "RegisterExecutionProviderLibrary": 301, "GetEpDevices": 303,
    "SessionOptionsAppendExecutionProvider_V2": 304, "EpDevice_EpName": 312, "SessionGetMemoryInfoForInputs": 380,
    "Session_GetEpGraphAssignmentInfo": 407, "EpAssignedSubgraph_GetEpName": 408, "EpAssignedSubgraph_GetNodes": 409,
    "EpAssignedNode_GetName": 410,
}
INT64 = 7
ERROR = 3


class Api:
    """The library's functions: `api.Name(...)` with ctypes arguments; raises an error for a failed status."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.OrtGetApiBase.restype = POINTER(c_void_p)
        base = self.library.OrtGetApiBase()
        self.version = ctypes.CFUNCTYPE(c_char_p)(base[1])().decode()
        table = ctypes.CFUNCTYPE(c_void_p, ctypes.c_uint32)(base[0])(VERSION)
        if not table:
            sys.exit(f"ONNX Runtime {self.version} is too old: no version {VERSION} of its interface")
        self.table = ctypes.cast(table, POINTER(c_void_p))

    def __getattr__(self, name):
        function = ctypes.CFUNCTYPE(c_void_p)(self.table[AT[name]])

        def call(*arguments):
            status = function(*arguments)
            if name != "ReleaseValue" and status:
                message = ctypes.CFUNCTYPE(c_char_p, c_void_p)(self.table[AT["GetErrorMessage"]])(status)
                sys.exit(f"{name}: {message.decode(errors='replace')}")

        return call

    def made(self, name, *arguments):
        """The object that a function returns through its last argument."""
        out = c_void_p()
        getattr(self, name)(*arguments, byref(out))
        return out


def text(value):
    return c_char_p(value.encode())


def add_provider(api, env, options, provider):
    """Puts the provider's first device before the host, with the library beside ONNX Runtime's, or WebGPU's plugin, as hpp-exec does."""
    beside = os.path.join(os.path.dirname(os.environ["ORT_DYLIB_PATH"]), "libonnxruntime_providers_cuda.so")
    library = {"cuda": beside, "webgpu": os.environ.get("HPP_WEBGPU_PLUGIN", "")}[provider]
    api.RegisterExecutionProviderLibrary(env, text(provider), text(library))
    devices, count = POINTER(c_void_p)(), c_size_t()
    api.GetEpDevices(env, byref(devices), byref(count))
    name = ctypes.CFUNCTYPE(c_char_p, c_void_p)(api.table[AT["EpDevice_EpName"]])
    wanted = [devices[at] for at in range(count.value) if name(devices[at]) in (b"WebGpuExecutionProvider", b"CUDAExecutionProvider")]
    if not wanted:
        sys.exit(f"{provider} finds no device")
    api.SessionOptionsAppendExecutionProvider_V2(options, env, (c_void_p * 1)(wanted[0]), c_size_t(1), None, None, c_size_t(0))


def assigned(api, session):
    """The number of layers whose attention is on the GPU, and on the host: the result of the assignment."""
    subgraphs, count = POINTER(c_void_p)(), c_size_t()
    api.Session_GetEpGraphAssignmentInfo(session, byref(subgraphs), byref(count))
    on = {"gpu": 0, "cpu": 0}
    for at in range(count.value):
        provider, nodes, many = c_char_p(), POINTER(c_void_p)(), c_size_t()
        api.EpAssignedSubgraph_GetEpName(c_void_p(subgraphs[at]), byref(provider))
        api.EpAssignedSubgraph_GetNodes(c_void_p(subgraphs[at]), byref(nodes), byref(many))
        for node in range(many.value):
            name = c_char_p()
            api.EpAssignedNode_GetName(c_void_p(nodes[node]), byref(name))
            if name.value.endswith(b"/GroupQueryAttention"):
                on["cpu" if provider.value == b"CPUExecutionProvider" else "gpu"] += 1
    return on


class Decoder:
    """A session, its caches, and its bindings."""

    def __init__(self, api, session, capacity, heads, size):
        self.api, self.session, self.host = api, session, api.made("CreateCpuMemoryInfo", c_int(0), c_int(0))
        self.binding = api.made("CreateIoBinding", session)
        self.bind_caches((c_int64 * 4)(1, heads, capacity, size))

    def bind_caches(self, shape):
        api, count = self.api, c_size_t()
        api.SessionGetInputCount(self.session, byref(count))
        homes = (c_void_p * count.value)()
        api.SessionGetMemoryInfoForInputs(self.session, homes, count)
        names = api.made("GetAllocatorWithDefaultOptions")
        for at in range(count.value):
            name = c_char_p()
            api.SessionGetInputName(self.session, c_size_t(at), names, byref(name))
            if not name.value.startswith(b"past_key_values."):
                continue
            info = api.made("CastTypeInfoToTensorInfo", api.made("SessionGetInputTypeInfo", self.session, c_size_t(at)))
            element = c_int()
            api.GetTensorElementType(info, byref(element))
            cache = api.made("CreateTensorAsOrtValue", api.made("CreateAllocator", self.session, c_void_p(homes[at])), shape,
                             c_size_t(4), element)
            api.BindInput(self.binding, name, cache)
            api.BindOutput(self.binding, c_char_p(name.value.replace(b"past_key_values", b"present")), cache)

    def feed(self, tokens, total):
        """One pass over `tokens`; the caches hold `total` tokens after it."""
        kept = [self.bind("input_ids", tokens), self.bind("attention_mask", [1] * total)]
        # Created for each pass, because the shape of the logits may change.
        self.api.BindOutputToDevice(self.binding, text("logits"), self.host)
        self.api.RunWithBinding(self.session, None, self.binding)
        self.api.SynchronizeBoundOutputs(self.binding)
        for value, _ in kept:
            self.api.ReleaseValue(value)

    def bind(self, name, numbers):
        data, shape = (c_int64 * len(numbers))(*numbers), (c_int64 * 2)(1, len(numbers))
        value = self.api.made("CreateTensorWithDataAsOrtValue", self.host, data, c_size_t(ctypes.sizeof(data)), shape, c_size_t(2),
                              c_int(INT64))
        self.api.BindInput(self.binding, text(name), value)
        return value, data


def generate(decoder, prompt, new):
    """Seconds to the first token, and tokens a second after it."""
    start = time.monotonic()
    decoder.feed([(index * 7 + 11) % 500 + 3 for index in range(prompt)], prompt)
    first = time.monotonic()
    for index in range(1, new):
        decoder.feed([index % 500 + 3], prompt + index)
    return {"ttft": first - start, "decode": (new - 1) / (time.monotonic() - first)}


def main():
    # A crash in the library then names the call that it happened in.
    faulthandler.enable()
    model, provider, gpu, cpu = sys.argv[1:5]
    prompt, new, capacity, threads, heads, size = map(int, sys.argv[5:11])
    api = Api(os.environ["ORT_DYLIB_PATH"])
    env = api.made("CreateEnv", c_int(ERROR), text("bench"))
    options = api.made("CreateSessionOptions")
    api.SetIntraOpNumThreads(options, c_int(threads))
    add_provider(api, env, options, provider)
    rules = ";".join(f"{device}({names})" for device, names in (("gpu", gpu), ("cpu", cpu)) if names)
    api.AddSessionConfigEntry(options, text("session.name_based_layer_assignment"), text(rules))
    api.AddSessionConfigEntry(options, text("session.record_ep_graph_assignment_info"), text("1"))
    session = api.made("CreateSession", env, text(model), options)
    decoder = Decoder(api, session, capacity, heads, size)
    generate(decoder, prompt, new)
    print(json.dumps(dict(generate(decoder, prompt, new), version=api.version, layers=assigned(api, session))), flush=True)
    # Nothing is released one by one: the process ends here, before the library's destructors.
    os._exit(0)


main()
