#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/dtensor/spec.h"

/// What an op does with placements. A rule looks at one call and returns a Plan: how each tensor
/// argument has to lie, and how each result does. The fallback (dispatch.cc) caches the plan, moves
/// the arguments, runs the op on the local tensors and wraps what it returns. A new op of a known
/// kind is its name in the list of its kind (rules/pointwise.cc and so on):
///
///   const RegisterRule kErf({"erf", "erf_"}, pointwise());
///
/// and one of a new kind lists the ways in which it runs along one mesh dim (plan_by_strategies).
namespace ppfsdp::dtensor {

/// One tensor among the arguments; each element of a list is one.
struct Operand {
  /// A plain tensor beside DTensors counts as the same full tensor on every rank: Replicate.
  SpecPtr spec;
  size_t argument = 0;  ///< index in the schema
  bool plain = false;
  bool written = false;  ///< the op writes to it
};

/// One call as a rule sees it.
class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
       std::vector<Operand> operands)
      : op_(op), arguments_(arguments), operands_(std::move(operands)) {}

  /// "aten::add.Tensor".
  std::string name() const;
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::vector<Operand>& operands() const { return operands_; }
  const Operand& self() const { return operands_.front(); }
  const std::vector<int64_t>& sizes() const { return self().spec->sizes; }
  int64_t ndim() const { return self().spec->ndim(); }
  /// The mesh of all operands. Throws, naming two, when they are on different ones.
  const mesh::DeviceMeshPtr& mesh() const;
  /// The index in the schema of the argument of that name, if there is one.
  std::optional<size_t> find(std::string_view argument) const;
  /// The argument of that name.
  const c10::IValue& arg(std::string_view argument) const;
  /// The indices into operands() of those that are (in) the argument of that name.
  std::vector<size_t> operands_of(std::string_view argument) const;

  /// The same call with other operands.
  Call with_operands(std::vector<Operand> operands) const {
    return {op_, arguments_, std::move(operands)};
  }

  /// The op's name and each operand's placements, for messages.
  std::string str() const;

 private:
  const c10::OperatorHandle& op_;
  c10::ArrayRef<c10::IValue> arguments_;
  std::vector<Operand> operands_;
};

/// The op on this rank's tensors.
struct LocalCall {
  const c10::OperatorHandle& op;
  /// Ends with the op's arguments, tensors replaced by the local ones; ends with the results after.
  torch::jit::Stack& stack;
  const mesh::DeviceMeshPtr& mesh;

  /// Argument `index` of the schema.
  c10::IValue& arg(size_t index) const {
    return stack[stack.size() - op.schema().arguments().size() + index];
  }
  /// Runs the op itself.
  void call() const { op.callBoxed(&stack); }
  /// Puts `results` in the place of the arguments.
  void finish(std::initializer_list<c10::IValue> results) const;
};
using LocalFunction = std::function<void(const LocalCall&)>;

/// How one tensor that the op returns lies. Tensors that the op returns because it wrote to them
/// need none: they are the arguments.
struct Result {
  Placements placements;
  std::vector<int64_t> sizes;  ///< global
  size_t mesh_operand = 0;     ///< an operand that is on its mesh
  /// Global; filled in by the fallback, the same on every rank.
  std::vector<int64_t> strides = {};
  bool plain = false;  ///< an element of a list that has nothing to do with DTensors
};

struct Plan {
  /// One an operand: where it has to lie; empty where it stays as it is. An operand that is written
  /// and has to lie elsewhere is computed there, and then put back.
  std::vector<Placements> inputs;
  /// For plain operands that move, one an operand: an operand whose mesh it is. Empty: the first
  /// DTensor's for all.
  std::vector<size_t> mesh_operands;
  /// The tensors that the op returns (lists flattened), those that alias arguments left out.
  std::vector<Result> results;
  /// What to run on the local tensors in the op's stead; empty for the op itself.
  LocalFunction local;
};

/// A rule. `reads_arguments`: the plan depends on arguments other than the tensors' specs.
struct Rule {
  std::function<Plan(const Call&)> plan;
  bool reads_arguments = true;
};

/// Registers one rule for several ops (named without "aten::") when constructed in static storage.
struct RegisterRule {
  RegisterRule(std::initializer_list<const char*> names, Rule rule);
};
/// The rule of the op called `name` ("aten::add.Tensor"), or null.
const Rule* find_rule(const std::string& name);
/// The names of all ops that have one, sorted.
std::vector<std::string> rule_names();

/// One way to run an op along one mesh dim: how each operand and each result then lies.
struct Strategy {
  std::vector<Placement> inputs;
  std::vector<Placement> results;
};

/// Chooses for each mesh dim the strategy that moves the fewest bytes (the first of equal ones) and
/// never moves an operand that is written if another strategy is there. `operands`: indices into
/// call.operands(), in the order of Strategy::inputs; they must be on one mesh. `strategies` is
/// called for each mesh dim.
struct Choice {
  std::vector<Placements> inputs;
  std::vector<Placements> results;
};
Choice choose(const Call& call, c10::ArrayRef<size_t> operands,
              const std::function<std::vector<Strategy>(int64_t mesh_dim)>& strategies);

/// choose() over all operands, as a Plan with results of `result_sizes`.
Plan plan_by_strategies(const Call& call, const std::vector<std::vector<int64_t>>& result_sizes,
                        const std::function<std::vector<Strategy>(int64_t mesh_dim)>& strategies);

/// Throws when the op writes to a plain tensor.
void check_written(const Call& call);

/// The placements with every Partial made Replicate.
Placements without_partials(Placements placements);

/// Dim `dim` of a tensor of `ndim` dims, negative ones counted from the end; an error if it is out
/// of range. As LibTorch's, it takes 0 and -1 for a tensor without dims.
int64_t wrap_dim(const Call& call, int64_t dim, int64_t ndim);
/// The same, but an error for a tensor without dims.
int64_t existing_dim(const Call& call, int64_t dim, int64_t ndim);

}  // namespace ppfsdp::dtensor
