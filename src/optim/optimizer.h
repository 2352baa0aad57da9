#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ppfsdp::optim {

/// Which of three equivalent ways a step takes. They are those of Python's torch.optim, and each
/// gives the bits of the same one there. kSingleTensor and kForeach agree with each other on the
/// CPU, and give the same bits for any sharding. kFused is the fastest, but its kernels for the CPU
/// round the last elements of a tensor otherwise than the rest, so that its bits depend on the
/// sharding.
enum class Implementation {
  kSingleTensor,  ///< one parameter after the other
  kForeach,       ///< one operation over all parameters after the other
  kFused,         ///< one kernel
};

/// An optimizer over plain tensors or DTensors.
///
/// A step is elementwise, so on DTensors each rank steps its local part, without communication and
/// without dispatch through DTensor. A gradient in other placements than its parameter is
/// redistributed first. Parameters without a gradient are passed over and their state stays as it
/// is.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates the parameters from their gradients.
  void step();

  /// Forgets the gradients, or fills them with zero.
  void zero_grad(bool set_to_none = true);

  /// Of the next step.
  double lr() const { return lr_; }
  /// Throws for a negative or non-finite rate.
  void set_lr(double lr);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  /// For checkpoints: what is kept for each parameter, by Python's names ("exp_avg"), beside
  /// `step`.
  const std::vector<std::string>& state_names() const { return state_names_; }
  /// State `name` of parameter `index`, laid out as the parameter; undefined before its first step.
  at::Tensor& state(size_t index, const std::string& name);
  /// Steps that parameter `index` has taken.
  int64_t step_count(size_t index) const { return step_counts_.at(index); }
  void set_step_count(size_t index, int64_t count) { step_counts_.at(index) = count; }

 protected:
  /// Throws unless the parameters are distinct leaves of floating point that are no Partial, and
  /// there is at least one.
  Optimizer(std::string name, std::vector<at::Tensor> parameters, double lr,
            Implementation implementation, std::vector<std::string> state_names);

  /// Parameters of one device and dtype with a gradient and a local part that is not empty. Where
  /// parameters, gradients and states of several are neighbours in memory, they are one here.
  struct Batch {
    std::vector<at::Tensor> parameters, grads;    ///< local parts
    std::vector<std::vector<at::Tensor>> states;  ///< local parts; [i] belongs to state_names()[i]
    std::vector<int64_t> steps;                   ///< counting this one
    size_t size() const { return parameters.size(); }
  };
  /// Does the step on local tensors; runs without autograd and below it.
  virtual void update(Batch& batch) = 0;

  /// Throws the error of an option: "AdamW: eps is -1, must not be negative".
  void check_option(bool right, const char* option, double value, const char* rule) const;

  Implementation implementation() const { return implementation_; }

 private:
  at::Tensor local_grad(size_t index) const;
  void check_states(size_t index) const;
  void create_states();
  static Batch join(const Batch& batch);

  std::string name_;
  std::vector<at::Tensor> parameters_;
  double lr_ = 0;
  Implementation implementation_;
  std::vector<std::string> state_names_;
  std::vector<std::vector<at::Tensor>> states_;  // [name][parameter]
  std::vector<int64_t> step_counts_;
};

}  // namespace ppfsdp::optim
