#pragma once

#include <cstdint>

namespace ppfsdp::train {

/// Which window of the data each training sequence is.
///
/// The data is cut into windows of seq_len inputs, each with the token after it as the last label,
/// so that in an epoch every token but the first is a label at most once. Each epoch visits the
/// windows in another order: a pseudo-random permutation that is computed for one index at a time
/// (a four-round Feistel network, cycle-walked to the number of windows), so the order takes no
/// memory and any step can be asked for. It depends on the seed and the sequence's number in the
/// training run, not on who asks: the world size can't change it.
class Sampler {
 public:
  /// `tokens`: length of the data. Throws ConfigError when it does not hold one window.
  Sampler(int64_t tokens, int64_t seq_len, uint64_t seed);

  /// Windows in an epoch.
  int64_t windows() const { return windows_; }

  /// The first token of sequence number `sequence` (0, 1, ... over the whole training; row r of
  /// step s is s * global_batch + r). Its inputs are the seq_len tokens from there, its labels
  /// those one further on.
  int64_t offset(int64_t sequence) const;

 private:
  int64_t seq_len_;
  uint64_t seed_;
  int64_t windows_;
  int half_bits_;
};

}  // namespace ppfsdp::train
