#!/usr/bin/env bash
# Fetches the project's dependencies into .deps/ only, except for Chromium, which is installed in the system. Can be repeated: existing
# files are kept.
#
#   deps.sh ort      ONNX Runtime from PyPI                          (make demo)
#   deps.sh test     the same, with onnx and the WebGPU plugin       (make test)
#   deps.sh openvino  OpenVINO's plug-in, in an environment of its own, so that only its tests find it   (make test)
#   deps.sh vulkan   a software Vulkan, out of Debian's packages     (make test)
#   deps.sh chromium  a Chromium, out of Debian's packages; prints its path     (make test)
#   deps.sh wheel    pip and auditwheel, in an environment of their own (make wheel)
#   deps.sh mypy     mypy, in an environment of its own           (make test)
#   deps.sh ray      Ray, in an environment of its own: 750 MB    (make test-ray)
#   deps.sh bench    onnxruntime-genai, in an environment of its own (make bench)
#   deps.sh llama-cpp  llama-cpp-python, built from source           (make bench-llama-cpp)
#   deps.sh llama-server  llama.cpp's server, built from the same source: 8 minutes of one core   (make bench-llama-cpp)
set -euo pipefail
cd "$(dirname "$0")/../.."

ORT_VERSION=1.31.1
WEBGPU_VERSION=0.4.0
OPENVINO_VERSION=1.8.1
ONNX_VERSION=1.23.2
GENAI_VERSION=0.18.0
ONNX_IR_VERSION=1.1.0
LLAMA_CPP_VERSION=0.3.36
GGUF_VERSION=0.19.0
CMAKE_VERSION=4.4.5
NINJA_VERSION=1.13.2
AUDITWHEEL_VERSION=6.8.2
MYPY_VERSION=2.4.1
NUMPY_VERSION=2.4.6
RAY_VERSION=2.60.0

say() { echo "deps: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

# new_environment DIR: a Python environment, or a directory of the same layout if venv is not installed.
new_environment() {
    local dir=$1
    [ -d "$dir/lib" ] && return
    command -v python3 >/dev/null || fail "python3 is missing; install it (Debian: apt-get install python3 python3-pip)"
    rm -rf "$dir"
    if python3 -m venv "$dir" >/dev/null 2>&1; then return; fi
    rm -rf "$dir"
    python3 -m pip --version >/dev/null 2>&1 || fail "python3 has neither venv nor pip; install one (Debian: apt-get install python3-pip)"
    say "python3 has no venv: packages go to a plain folder"
    mkdir -p "$dir/$(site_packages)"
}

site_packages() { python3 -c 'import sys; print("lib/python%d.%d/site-packages" % sys.version_info[:2])'; }

# install DIR PACKAGE...: installs packages into an environment, once per list of packages.
install() {
    local dir=$1 mark
    shift
    new_environment "$dir"
    mark="$dir/installed-$(echo "$*" | tr -c 'a-zA-Z0-9.\n' '_')"
    [ -e "$mark" ] && return
    say "installing $* into $dir"
    if [ -x "$dir/bin/python" ]; then
        "$dir/bin/python" -m pip install --quiet --disable-pip-version-check "$@" </dev/null
    else
        python3 -m pip install --quiet --disable-pip-version-check --upgrade --target "$dir/$(site_packages)" "$@" </dev/null
    fi
    touch "$mark"
}

# SwiftShader and the Vulkan loader, unpacked from Debian's chromium-common and libvulkan1; nothing is installed.
fetch_vulkan() {
    local dir=.deps/vulkan
    [ -e "$dir/icd.json" ] && return
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "no apt-get here: software Vulkan is skipped"
    rm -rf "$dir" && mkdir -p "$dir/deb"
    [ "$(id -u)" = 0 ] && { apt-get update -qq </dev/null >&2 || say "apt-get update failed; using the lists there are"; }
    say "downloading software Vulkan"
    (cd "$dir/deb" && apt-get download -qq -o APT::Sandbox::User=root chromium-common libvulkan1 </dev/null >&2) || fail "apt-get download failed: software Vulkan is skipped"
    local package
    for package in "$dir"/deb/*.deb; do dpkg-deb -x "$package" "$dir/deb/x"; done
    cp "$dir"/deb/x/usr/lib/chromium/libvk_swiftshader.so "$dir/"
    cp -L "$dir"/deb/x/usr/lib/*-linux-gnu/libvulkan.so.1 "$dir/"
    rm -rf "$dir/deb"
    echo '{"file_format_version":"1.0.0","ICD":{"library_path":"./libvk_swiftshader.so","api_version":"1.1.0"}}' >"$dir/icd.json"
}

# The path of a Chromium that starts: the named one, else the system's.
find_chromium() {
    local name path
    for name in "${HPP_CHROMIUM:-}" chromium chromium-browser google-chrome; do
        path=$(command -v "$name" 2>/dev/null) && "$path" --version >/dev/null 2>&1 && echo "$path" && return
    done
    return 1
}

# A browser needs many system libraries, so it is installed as a package if possible.
fetch_chromium() {
    find_chromium && return
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] || fail "no Chromium here, and no apt-get with root to install one: the browser tests are skipped"
    say "installing chromium with apt-get"
    apt-get update -qq </dev/null >&2 || say "apt-get update failed; using the lists there are"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-liberation </dev/null >&2 || fail "apt-get install chromium failed: the browser tests are skipped"
    find_chromium || fail "the installed Chromium does not start: the browser tests are skipped"
}

# The compilers' options of llama.cpp: this machine's instructions except AMX, because its AMX kernels crash in virtual machines that report
# AMX and forbid it.
llama_cpp_flags() {
    [ "$(uname -m)" = x86_64 ] && echo "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    return 0
}

install_llama_cpp() {
    local flags
    flags=$(llama_cpp_flags)
    export CMAKE_ARGS="-DCMAKE_C_FLAGS='$flags' -DCMAKE_CXX_FLAGS='$flags' ${CMAKE_ARGS:-}"
    install .deps/bench-venv "llama-cpp-python==$LLAMA_CPP_VERSION"
    install .deps/bench-venv "gguf==$GGUF_VERSION"
}

# The package of llama-cpp-python has no server but a Python one; its source has all of llama.cpp.
build_llama_server() {
    local dir=.deps/llama-server tools=.deps/llama-build-venv/bin flags
    [ -e "$dir/llama-server" ] && return
    install .deps/llama-build-venv "cmake==$CMAKE_VERSION" "ninja==$NINJA_VERSION"
    [ -x "$tools/ninja" ] || fail "llama-server needs python3 with venv; install it (Debian: apt-get install python3-venv)"
    say "building llama-server"
    rm -rf "$dir" && mkdir -p "$dir/source"
    "$tools/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest "$dir" \
        "llama-cpp-python==$LLAMA_CPP_VERSION" </dev/null >&2
    tar -xzf "$dir"/*.tar.gz -C "$dir/source" --strip-components 1
    flags=$(llama_cpp_flags)
    "$tools/cmake" -G Ninja -S "$dir/source/vendor/llama.cpp" -B "$dir/build" -DCMAKE_MAKE_PROGRAM="$PWD/$tools/ninja" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >&2
    "$tools/ninja" -C "$dir/build" llama-server >&2
    mv "$dir/build/bin/llama-server" "$dir/"
    rm -rf "$dir/source" "$dir/build" "$dir"/*.tar.gz
}

case ${1:-} in
    ort) install .deps/venv "onnxruntime==$ORT_VERSION" ;;
    test) install .deps/venv "onnxruntime==$ORT_VERSION" && install .deps/venv "onnx==$ONNX_VERSION" && install .deps/venv "onnxruntime-ep-webgpu==$WEBGPU_VERSION" ;;
    openvino) install .deps/openvino --no-deps "onnxruntime-ep-openvino==$OPENVINO_VERSION" ;;
    vulkan) fetch_vulkan ;;
    chromium) fetch_chromium ;;
    wheel) install .deps/wheel-venv "auditwheel==$AUDITWHEEL_VERSION" ;;
    mypy) install .deps/mypy-venv "mypy==$MYPY_VERSION" "numpy==$NUMPY_VERSION" ;;
    ray) install .deps/ray-venv "ray[data,serve]==$RAY_VERSION" "onnxruntime==$ORT_VERSION" ;;
    bench) install .deps/bench-venv "onnxruntime==$ORT_VERSION" "onnx==$ONNX_VERSION" "onnxruntime-genai==$GENAI_VERSION" && install .deps/bench-venv "onnx-ir==$ONNX_IR_VERSION" ;;
    llama-cpp) install_llama_cpp ;;
    llama-server) build_llama_server ;;
    *) sed -n '2,16p' "$0" >&2; exit 2 ;;
esac
