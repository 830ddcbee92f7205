// SPDX-License-Identifier: Apache-2.0
// Stands for bench*_cuda.cc in builds without CUDA. Never called: the commands check for a GPU
// first.
#include "cli/bench_cuda.h"
#include "cli/bench_ffn_cuda.h"
#include "cli/bench_train.h"
#include "twell/base/error.h"

namespace twell::cli {
namespace {

[[noreturn]] void refuse() { throw InputError("this program was built without CUDA"); }

}  // namespace

int run_bench_forward_cuda(const BenchForwardCuda&) { refuse(); }
int run_bench_decode_cuda(const BenchDecode&) { refuse(); }
int run_bench_train_cuda(const BenchTrain&) { refuse(); }
void run_bench_ffn_cuda(const FfnBenchmark&, double, const std::vector<FfnPattern>&,
                        const std::filesystem::path&) {
  refuse();
}
void run_bench_ffn_sweep(const FfnSweepOptions&) { refuse(); }

}  // namespace twell::cli
