#!/usr/bin/env bash
# What is to be known of a GPU, in one visit of under ten minutes: gradients against the CPU's,
# layouts against each other, bf16 against fp32, tokens/s of a GPT-2 beside a compiled PyTorch.
#
#   bench/gpu.sh [BINARY]      the program of bench/gpu, default target/release/examples/gpu
#
# Neither Rust nor the source is needed beside this file, gpu_torch.py and the binary: docs/gpu.md
# says how to build and carry it. Writes a table to $OUT/gpu.md (default: here) and the compiled
# kernels to $OUT/kernels.tgz, which the next visit takes if it lies beside this file.
# The text to train on is tinyshakespeare.txt, if that lies beside this file, else the binary's own.
# ZEROPP_GPU_FLAGS goes to the binary (`--device wgpu --small` tries the script without a GPU).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
binary=$(readlink -f "${1:-$here/../target/release/examples/gpu}")
out=$(readlink -f "${OUT:-.}")
read -ra flags <<<"${ZEROPP_GPU_FLAGS:-}"
if [[ -f $here/tinyshakespeare.txt ]]; then flags+=(--data "$here/tinyshakespeare.txt"); fi
python=$(command -v python3 || true)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# --- The toolkit's headers and NVRTC, where they are but nobody said so --------------------------
site=
if [[ -n $python ]]; then site=$("$python" -c 'import site; print(site.getsitepackages()[0])' || true); fi
for toolkit in "${CUDA_PATH:-}" /usr/local/cuda /usr/local/cuda-13* /opt/cuda "$site/nvidia/cu13"; do
    if [[ -f $toolkit/include/cuda_fp16.h && -f $toolkit/include/crt/mma.h ]]; then
        export CUDA_PATH=$toolkit
        for folder in "$toolkit"/{lib64,lib,targets/x86_64-linux/lib}; do
            if compgen -G "$folder/libnvrtc.so*" >/dev/null; then
                export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}
            fi
        done
        break
    fi
done

# --- Kernels compiled by an earlier visit --------------------------------------------------------
mkdir -p "$work/kernels"
if [[ -f $here/kernels.tgz ]]; then tar xzf "$here/kernels.tgz" -C "$work/kernels"; fi
cat >"$work/cubecl.toml" <<TOML
[compilation]
cache = true
[environment]
path = { directory = "$work/kernels" }
TOML

# --- The table -----------------------------------------------------------------------------------
failed=0
{
    echo "# $(date -u +%F), $(command -v nvidia-smi >/dev/null &&
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1 || echo "no nvidia-smi")"
    echo
    echo "| what | measured | wanted |"
    echo "|---|---|---|"
} >"$out/gpu.md"
cd "$work" || exit 1
# What matters most comes first; what does not end in time does not take the others' away.
# All of them together, the kernels' archive included, fit into a visit.
visit=${ZEROPP_GPU_SECONDS:-570}
# In a longer visit each part may take longer: an emulator shares its cores.
scale=$((visit > 570 ? visit : 570))
part() { # seconds, environment, part
    local rc=0 limit
    limit=$(left "$1")
    if ((limit < 5)); then
        echo "| $3 | no time was left of $visit s | |" >>"$out/gpu.md"
        failed=1
        return
    fi
    timeout -k 5 "$limit" env "$2" "$binary" "${flags[@]}" "$3" >>"$out/gpu.md" 2>"$work/log" || rc=$?
    tail -n 5 "$work/log" >&2
    if [[ $rc == 124 ]]; then echo "| $3 | did not end in $limit s | |" >>"$out/gpu.md"; fi
    if [[ $rc == 2 ]]; then exit 2; fi
    if [[ $rc != 0 ]]; then failed=1; fi
}
left() { # SECONDS: so many of 570, or what the visit has
    local most=$(($1 * scale / 570))
    ((most <= visit - SECONDS)) && echo "$most" || echo $((visit - SECONDS))
}
# Where only the result counts, as few kernels as possible are tried.
few=CUBECL_AUTOTUNE_LEVEL=0
part 150 $few gradients
part 120 $few layouts
part 120 $few gpt2
part 120 $few llama
if [[ -n $python ]] && "$python" -c 'import torch' 2>/dev/null && (($(left 120) >= 30)); then
    timeout -k 5 "$(left 120)" "$python" "$here/gpu_torch.py" >>"$out/gpu.md" || failed=1
elif [[ -n $python ]] && "$python" -c 'import torch' 2>/dev/null; then
    echo "| PyTorch | no time was left of $visit s | |" >>"$out/gpu.md"
else
    echo "| PyTorch | is not installed here | |" >>"$out/gpu.md"
fi
part 150 $few bf16
part 60 $few products
part 60 CUBECL_AUTOTUNE_LEVEL=1 peak
part 60 CUBECL_AUTOTUNE_LEVEL=1 attention
if [[ -n ${ZEROPP_GPU_LONG:-} ]]; then
    visit=$((visit + 400 * scale / 570))
    part 400 $few pipeline
fi
if [[ -n ${OUT:-} ]]; then tar czf "$out/kernels.tgz" -C "$work/kernels" .; fi
cat "$out/gpu.md"
exit $failed
