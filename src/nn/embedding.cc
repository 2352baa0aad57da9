#include "src/nn/embedding.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace ppfsdp::nn {

EmbeddingImpl::EmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim, Options options)
    : init_(std::move(options.init)) {
  TORCH_CHECK(num_embeddings > 0 && embedding_dim > 0, "Embedding: num_embeddings ", num_embeddings,
              " and embedding_dim ", embedding_dim, " must be positive");
  TORCH_CHECK(init_, "Embedding: the initializer is empty");
  register_parameter("weight", weight, at::empty({num_embeddings, embedding_dim}, options.tensor));
  reset_parameters();
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  return at::embedding(weight, tokens);
}

void EmbeddingImpl::reset_parameters() {
  // The entry, not the slot: under fully_shard this is the sharded parameter.
  init_(named_parameters(/*recurse=*/false)["weight"]);
}

}  // namespace ppfsdp::nn
