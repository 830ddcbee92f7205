#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a bare machine to a trained sparse language model: installs what it needs, builds, trains a
# small model on text that every such machine has, and shows the result. Where there is an
# NVIDIA GPU and a CUDA toolkit it builds for the GPU too, and trains there.
#   scripts/quickstart.sh                 trains on the documentation and headers of this machine
#   scripts/quickstart.sh --data PATH     trains on your text (repeatable)
#   scripts/quickstart.sh --out DIR       elsewhere than runs/quickstart
#   scripts/quickstart.sh --cuda          builds the GPU code even where there is no GPU
# More options are passed on to `twell train` (for example --steps 2000). A run that was interrupted
# is continued; a finished one is only examined again.
set -euo pipefail
cd "$(dirname "$0")/.."

out=runs/quickstart
data=()
train=()
# Compiling the GPU code doubles the build time, so it is off without a GPU.
cuda=OFF
[[ -e /dev/nvidiactl ]] && cuda=AUTO
while [[ $# -gt 0 ]]; do
  case $1 in
    --data | --out)
      [[ $# -ge 2 ]] || { echo "quickstart: $1 needs a value" >&2; exit 2; }
      if [[ $1 == --data ]]; then data+=(--data "$2"); else out=$2; fi
      shift 2
      ;;
    --cuda)
      cuda=AUTO
      shift
      ;;
    -h | --help)
      sed -n '3,11s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *)
      train+=("$1")
      shift
      ;;
  esac
done

step() { printf '\n== %s\n' "$*"; }

step "install and build"
scripts/setup.sh
# Rooms compiled as one unit each take half the time.
[[ -f build/release/build.ninja ]] ||
  cmake --preset release -DTWELL_PRECOMPILE=ON -DTWELL_CUDA="$cuda" -DCMAKE_UNITY_BUILD=ON \
    -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 >/dev/null
cmake --build --preset release --target twell
twell=build/release/twell

if [[ ${#data[@]} == 0 ]]; then
  # Text installed with the build tools: headers, documentation, licences.
  for folder in /usr/include /usr/share/cmake-* /usr/share/doc /usr/share/common-licenses; do
    [[ -d $folder ]] && data+=(--data "$folder")
  done
fi

step "train"
if [[ -e $out/options.json ]]; then
  # The run folder stores its options, so only those given now are passed.
  "$twell" train --out "$out" --resume "${train[@]}"
else
  "$twell" train --config recipes/quickstart.toml --out "$out" "${data[@]}" "${train[@]}"
fi

step "inspect: active neurons on held-out text"
"$twell" inspect --checkpoint "$out/checkpoint" --shards "$out/shards"

step "evaluate on held-out text"
"$twell" eval --checkpoint "$out/checkpoint" --shards "$out/shards"

step "benchmark: dense against sparse on held-out text"
"$twell" bench forward --checkpoint "$out/checkpoint" --shards "$out/shards" \
  --jsonl "$out/bench.jsonl"

step "generate"
"$twell" generate --checkpoint "$out/checkpoint" --prompt '#include <' --max-tokens 120 \
  --temperature 0.7 --top-p 0.95 --seed 1

step "report ($out/report.json)"
"$twell" report --out "$out"
