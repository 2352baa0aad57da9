#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

#include "src/nn/init.h"
#include "src/nn/module.h"

namespace ppfsdp::nn {

/// Row `tokens[i]` of a table for each token.
class EmbeddingImpl : public Module {
 public:
  struct Options {
    Initializer init = normal(0.0, 1.0);
    c10::TensorOptions tensor;
  };

  /// Values are initial ones (reset_parameters).
  EmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim, Options options);
  EmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : EmbeddingImpl(num_embeddings, embedding_dim, Options()) {}

  /// Integers of any shape to [..., embedding_dim]. A token that the table lacks is an error.
  at::Tensor forward(const at::Tensor& tokens);
  void reset_parameters() override;

  at::Tensor weight;  ///< [num_embeddings, embedding_dim]

 private:
  Initializer init_;
};
PPFSDP_MODULE(Embedding);

}  // namespace ppfsdp::nn
