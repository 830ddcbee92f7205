#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks training with two GPUs on a machine that has them: tests, curves, faults, torchrun, speed.
#   scripts/check_two_gpus.sh [BUILD]     BUILD: folder of the release build (build/release)
#   QUICK=1    without the benchmarks of the larger presets
# Prints a line per check and exits with 1 when one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}
twell=$PWD/$build/twell
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
# PyPI's NCCL, where Python has it.
nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib")' 2>/dev/null || true)
[[ -z $nccl ]] || export LD_LIBRARY_PATH=$nccl:${LD_LIBRARY_PATH:-}

failed=0
check() {  # check NAME COMMAND...
  local name=$1
  shift
  if "$@"; then echo "ok      $name"; else echo "FAILED  $name"; failed=1; fi
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== tests"
check "collectives over NCCL" timeout 200 "$build/library/dist_cuda_test" --gtest_brief=1
check "training on one and two GPUs" timeout 400 "$build/library/train_cuda_test" --gtest_brief=1

echo "== the command"
train() {  # train OUT MORE...
  local out=$work/$1
  shift
  "$twell" train --data docs --out "$out" --width 256 --ffn 1024 --layers 4 --heads 4 \
    --context 256 --vocab-size 1024 --micro-batch 4 --batch-tokens 8192 --steps 80 \
    --validate-every 20 --save-every 20 --device cuda "$@" >"$out.out" 2>"$out.err"
}
# The losses of two runs differ by at most $3.
curves() {
  python3 - "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" "$3" <<'PY'
import json, sys
a, b = ([json.loads(l).get("ce") for l in open(f)] for f in sys.argv[1:3])
pairs = [(x, y) for x, y in zip(a, b) if x is not None]
worst = max(abs(x - y) for x, y in pairs)
print(f"        {len(pairs)} losses, {pairs[0][0]:.3f} to {pairs[-1][0]:.3f}, differ by {worst:.2g} at most")
sys.exit(len(a) != len(b) or len(pairs) < 80 or worst > float(sys.argv[3]))
PY
}
same_weights() {
  cmp "$work/$1/checkpoint/model.safetensors" "$work/$2/checkpoint/model.safetensors"
}
check "one GPU" train one
check "two GPUs" train two --gpus 2
check "same curve" curves one two 0.02
check "two GPUs again" train again --gpus 2
check "same bits" same_weights two again
check "gradients in bf16" train bf16 --gpus 2 --gradient-dtype bf16
check "nearly the same curve" curves one bf16 0.05
check "reinitialised dead neurons" train reinit --gpus 2 --reinit-dead
sparse=(--ffn-policy hybrid --l1 1e-3)
check "hybrid layers, one GPU" train hybrid1 "${sparse[@]}"
check "hybrid layers, two GPUs" train hybrid2 --gpus 2 "${sparse[@]}"
check "nearly the same curve" curves hybrid1 hybrid2 0.05

signal_rank() {  # signal_rank OUT SIGNAL STEP: sends it to rank 1 when the run has done the step
  local i
  for ((i = 0; i < 6000; ++i)); do
    [[ $(cat "$work/$1/metrics.jsonl" 2>/dev/null | wc -l) -ge $3 ]] && break
    sleep 0.01
  done
  kill "-$2" "$(sed -n 's/^ranks: 2 processes, [0-9]* \([0-9]*\)$/\1/p' "$work/$1.out")"
}
restarted() {  # restarted OUT MORE...: a rank is killed, and the launcher resumes the run
  train "$@" --gpus 2 --max-restarts 1 &
  local launcher=$!
  signal_rank "$1" KILL 30
  wait $launcher && grep -q "restart 1 of 1" "$work/$1.err"
}
check "a killed run resumes by itself" restarted restarted
check "to the same bits" same_weights two restarted
check "so does one with hybrid layers" restarted hybrid "${sparse[@]}"
check "to the same bits" same_weights hybrid2 hybrid

lost() {  # lost OUT SIGNAL PATTERN: a rank is lost in the middle of a run
  train "$1" --gpus 2 --collective-timeout 10 --steps 100000 --warmup-steps 10 --validate-every 0 &
  local launcher=$!
  signal_rank "$1" "$2" 50
  wait $launcher && return 1
  sed 's/^/        /' "$work/$1.err"
  grep -q "$3" "$work/$1.err"
}
check "a killed rank is named" lost killed KILL "rank 1 ended in step"
check "a stopped rank is named" lost stopped STOP "rank 1 has not answered"
resume() {
  local steps
  steps=$(wc -l <"$work/killed/metrics.jsonl")
  "$twell" train --out "$work/killed" --resume --steps $((steps + 20)) --device cuda "$@" \
    >"$work/resume.out" 2>&1 || { cat "$work/resume.out"; return 1; }
}
check "resumed on one GPU" resume
check "resumed on two" resume --gpus 2

if command -v torchrun >/dev/null || python3 -c 'import torch' 2>/dev/null; then
  sockets() {  # two "machines": no peer-to-peer copies, no shared memory
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 python3 -m torch.distributed.run --nproc-per-node 2 \
      --no-python "$twell" train --data docs --out "$work/sockets" --width 256 --ffn 1024 \
      --layers 4 --heads 4 --context 256 --vocab-size 1024 --micro-batch 4 --batch-tokens 8192 \
      --steps 80 --validate-every 20 --save-every 20 --device cuda >"$work/sockets.out" 2>&1 ||
      { cat "$work/sockets.out"; return 1; }
  }
  check "torchrun, over sockets" sockets
  check "same bits over sockets" same_weights two sockets
fi

echo "== speed"
speed() {  # speed PRESET MORE...: tokens per second of one and two GPUs
  local preset=$1 gpus rate first=
  shift
  for gpus in 1 2; do
    rate=$("$twell" bench train --preset "$preset" --micro-batch 8 --gpus $gpus "$@" |
      tee "$work/bench.out" | awk '$1 == "tokens/s" {print $2}')
    [[ -n $rate ]] || { cat "$work/bench.out"; return 1; }
    grep -E "^(tokens/s|step|memory|MFU)" "$work/bench.out" | sed "s/^/        $gpus GPU: /"
    [[ -n $first ]] && python3 -c "print(f'        {$rate / $first:.3f}x of one GPU')"
    first=$rate
  done
}
presets=(0.5b 2b)
[[ ${QUICK:-0} == 0 ]] || presets=(0.5b)
for preset in "${presets[@]}"; do
  check "$preset, micro-batch 8 per GPU" speed "$preset"
  check "$preset, gradients in bf16" speed "$preset" --gradient-dtype bf16
done
exit $failed
