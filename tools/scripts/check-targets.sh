#!/usr/bin/env bash
# Type-checks the workspace, tests included, for other systems than this one: Rust's standard library for them is all that it takes.
#
#   check-targets.sh [TARGET...]     without arguments: the systems of docs/SCALE.md
#
# C and assembly sources of other crates are not compiled: type checking links nothing, so a stand-in for their compilers writes empty
# files. Ends with 1 if a target is missing or its check fails, after all others have been checked.
set -euo pipefail
cd "$(dirname "$0")/../.."

targets=("$@")
[ $# -gt 0 ] || targets=(x86_64-pc-windows-msvc x86_64-pc-windows-gnu aarch64-unknown-linux-gnu aarch64-apple-darwin)

# Always the same directory: another would run the build scripts of these crates again.
stand_ins=${CARGO_TARGET_DIR:-target}/stand-ins
mkdir -p "$stand_ins"
stand_ins=$(cd "$stand_ins" && pwd)
# Build scripts name the output as `-o FILE`, `-FoFILE`, `-out:FILE`, and an archive as a word that ends in .a.
cat >"$stand_ins/compiler" <<'EOF'
#!/usr/bin/env bash
while [ $# -gt 0 ]; do
    case $1 in
    -o) : >"$2"; shift ;;
    -Fo* | /Fo*) : >"${1#?Fo}" ;;
    -out:* | /OUT:*) : >"${1#*:}" ;;
    *.a) : >"$1" ;;
    esac
    shift
done
EOF
chmod +x "$stand_ins/compiler"
# The names by which build scripts for MSVC call an assembler and an archiver.
ln -sf compiler "$stand_ins/ml64.exe"
ln -sf compiler "$stand_ins/lib.exe"

check() {
    local target=$1 tool
    local name=${target//-/_}
    for tool in CC CXX AR RANLIB; do
        export "${tool}_$name=$stand_ins/compiler"
    done
    # Build scripts for Apple's systems ask Xcode for the path of its SDK otherwise.
    SDKROOT=/ PATH="$stand_ins:$PATH" \
        cargo check --workspace --all-targets --locked --keep-going --target "$target"
}

failed=()
for target in "${targets[@]}"; do
    if ! library=$(rustc --print target-libdir --target "$target" 2>/dev/null); then
        echo "check-targets: rustc knows no target $target (rustc --print target-list)" >&2
        failed+=("$target")
    elif [ ! -d "$library" ]; then
        echo "check-targets: no standard library for $target: rustup target add $target" >&2
        failed+=("$target")
    elif ! check "$target"; then
        echo "check-targets: $target FAILED" >&2
        failed+=("$target")
    else
        echo "check-targets: $target is well typed, $(rustc --version)"
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "check-targets: not checked, or failed: ${failed[*]}" >&2
    exit 1
fi
