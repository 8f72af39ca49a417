#!/usr/bin/env bash
# Runs a command with a memory limit, page cache included, in a memory control group of its own. Needs root; without it, a warning is
# printed and the command runs without a limit.
#
#   tools/scripts/with-memory.sh 300M hpp-exec plan.yaml --prompt "..."
set -euo pipefail
[ $# -gt 1 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
limit=$(numfmt --from=iec "$1")
shift

# The first of this process's groups in which a group with a limit can be created.
make_group() {
    local controllers path folder file
    while IFS=: read -r _ controllers path; do
        case ",$controllers," in
            *,memory,*) folder=/sys/fs/cgroup/memory${path%/} file=memory.limit_in_bytes peak=memory.max_usage_in_bytes ;;
            ,,) folder=/sys/fs/cgroup${path%/} file=memory.max peak=memory.peak ;;
            *) continue ;;
        esac
        [ -e "$folder/cgroup.procs" ] && group=$folder/hpp-$$ && mkdir "$group" 2>/dev/null || continue
        [ -e "$group/$file" ] && echo "$limit" >"$group/$file" 2>/dev/null && return
        rmdir "$group"
    done </proc/self/cgroup
    return 1
}

if ! make_group; then
    echo "with-memory: no memory limit can be set here (it takes root and a memory control group): running without" >&2
    exec "$@"
fi
code=0
(echo "$BASHPID" >"$group/cgroup.procs" && exec "$@") || code=$?
most=$(cat "$group/$peak" 2>/dev/null || echo 0)
echo "with-memory: $((most >> 20)) of $((limit >> 20)) MiB were in use at most, cached files included" >&2
for _ in 1 2 3 4 5; do rmdir "$group" 2>/dev/null && break || sleep 0.1; done
exit "$code"
