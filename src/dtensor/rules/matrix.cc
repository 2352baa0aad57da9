// Products of matrices, written as subscripts: "mk,kn->mn". Splitting a letter of the result splits
// the result; splitting a letter that is summed over makes it Partial(sum).
#include <algorithm>
#include <string>

#include "src/dtensor/rule.h"
#include "src/dtensor/sharding.h"

namespace ppfsdp::dtensor {
namespace {

struct Product {
  /// One letter a dim of each factor; the factors are the last operands of the call.
  std::vector<std::string> factors;
  std::string result;
};

/// `letters` of the operand that is added to the product, when there is one: those of the last dims
/// of the result, '1' for a dim that is broadcast.
std::string addend_letters(const Call& call, const std::string& result,
                           const std::vector<int64_t>& sizes) {
  const std::vector<int64_t>& own = call.sizes();
  TORCH_CHECK(own.size() <= sizes.size(), call.name(), ": the first operand has more dims than ",
              "the product: ", call.str());
  const size_t lead = sizes.size() - own.size();
  std::string letters = result.substr(lead);
  for (size_t dim = 0; dim < own.size(); ++dim) {
    TORCH_CHECK(own[dim] == 1 || own[dim] == sizes[lead + dim], call.name(),
                ": the global sizes do not broadcast: ", call.str());
    letters[dim] = own[dim] == 1 && sizes[lead + dim] != 1 ? '1' : letters[dim];
  }
  return letters;
}

/// `placement` on the dim that `letter` has in `letters`; whole where it has none.
Placement on_letter(const Placement& placement, const std::string& letters, char letter) {
  const size_t dim = letters.find(letter);
  if (dim == std::string::npos) {
    return Placement::replicate();
  }
  return placement.is_shard()
             ? Placement::shard(static_cast<int64_t>(dim))
             : Placement::strided_shard(static_cast<int64_t>(dim), placement.split_factor());
}

Plan product(const Call& call, const Product& product) {
  const size_t count = product.factors.size();
  TORCH_INTERNAL_ASSERT(call.operands().size() >= count);
  const size_t first = call.operands().size() - count;  // 1 when something is added
  std::string known;
  std::vector<int64_t> known_sizes;
  for (size_t k = 0; k < count; ++k) {
    const std::vector<int64_t>& own = call.operands()[first + k].spec->sizes;
    TORCH_CHECK(own.size() == product.factors[k].size(), call.name(), ": operand ", first + k,
                " must have ", product.factors[k].size(), " dims: ", call.str());
    for (size_t dim = 0; dim < own.size(); ++dim) {
      const size_t at = known.find(product.factors[k][dim]);
      if (at == std::string::npos) {
        known += product.factors[k][dim];
        known_sizes.push_back(own[dim]);
      } else {
        TORCH_CHECK(known_sizes[at] == own[dim], call.name(),
                    ": the global sizes do not match: ", call.str());
      }
    }
  }
  std::vector<int64_t> sizes;
  for (char letter : product.result) {
    sizes.push_back(known_sizes[known.find(letter)]);
  }
  std::vector<std::string> letters = product.factors;
  if (first == 1) {
    letters.insert(letters.begin(), addend_letters(call, product.result, sizes));
  }
  return plan_by_strategies(call, {sizes}, [&](int64_t mesh_dim) {
    const Placement whole = Placement::replicate();
    const Placement sum = Placement::partial();
    std::vector<Strategy> strategies;
    for (size_t k = 0; k < letters.size(); ++k) {
      const Placement& now = call.operands()[k].spec->placements[mesh_dim];
      if (splits(now) && letters[k][now.dim()] != '1') {
        const char letter = letters[k][now.dim()];
        const bool summed = product.result.find(letter) == std::string::npos;
        Strategy strategy;
        for (const std::string& own : letters) {
          strategy.inputs.push_back(on_letter(now, own, letter));
        }
        // What is added to partial products is added once.
        if (summed && first == 1) {
          strategy.inputs.front() = sum;
        }
        strategy.results.push_back(summed ? sum : on_letter(now, product.result, letter));
        strategies.push_back(std::move(strategy));
      }
      if (now == sum && k >= first) {
        Strategy strategy{Placements(letters.size(), whole), {sum}};
        strategy.inputs[k] = sum;
        if (first == 1) {
          strategy.inputs.front() = sum;
        }
        strategies.push_back(std::move(strategy));
      }
    }
    strategies.push_back({Placements(letters.size(), whole), {whole}});
    return strategies;
  });
}

Rule rule(const Product& of) {
  return {[of](const Call& call) { return product(call, of); }, /*reads_arguments=*/false};
}

const RegisterRule kMm({"mm", "addmm"}, rule({{"mk", "kn"}, "mn"}));
const RegisterRule kBmm({"bmm", "baddbmm"}, rule({{"bmk", "bkn"}, "bmn"}));
const RegisterRule kMv({"mv"}, rule({{"mk", "k"}, "m"}));
const RegisterRule kDot({"dot"}, rule({{"k", "k"}, ""}));

}  // namespace
}  // namespace ppfsdp::dtensor
