#pragma once

#include <ATen/core/MT19937RNGEngine.h>

#include <cstdint>

namespace ppfsdp::dtensor {

/// Moves a Mersenne Twister's state on by `count` draws of 32 bits: what drawing and dropping them
/// would leave, byte for byte. A few millions are stepped over, at a fraction of the time of
/// drawing; more are jumped over, in a few milliseconds however many they are.
///
/// The jump: the state after J steps is linear in the state now, over the field of two elements,
/// and by the theorem of Cayley and Hamilton the sum of those of the first 19937 steps that x^J
/// modulo the characteristic polynomial of one step names (Haramoto, Matsumoto, Nishimura,
/// Panneton, L'Ecuyer, "Efficient jump ahead for F2-linear random number generators", 2008). That
/// polynomial, of 135 terms, is given by Matsumoto and Nishimura, "Mersenne Twister", 1998,
/// appendix.
void skip_draws(at::mt19937_data_pod& state, uint64_t count);

}  // namespace ppfsdp::dtensor
