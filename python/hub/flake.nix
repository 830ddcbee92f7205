# SPDX-License-Identifier: Apache-2.0
{
  description = "Sparse feed-forward layers for ReLU language models";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
