#include "src/train/config_keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "src/nn/llama_config.h"

namespace ppfsdp::train {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Bounds that refuse an infinity.
constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kLargestInt = 9.0e15;
// Bounds of the model's dimensions are far above any model and keep a count of its parameters, and
// six times that, below 2^63.

#define PPFSDP_FIELD(member) [](Config& config) -> Field { return &config.member; }

using FieldOf = Field (*)(Config&);

Key number(std::string_view name, FieldOf field, std::string_view unit, std::string_view help,
           double min, double max) {
  return {.name = name, .field = field, .unit = unit, .help = help, .min = min, .max = max};
}

Key one_of(std::string_view name, FieldOf field, std::string_view help,
           std::vector<std::string_view> choices) {
  return {.name = name, .field = field, .help = help, .choices = std::move(choices)};
}

/// A key whose type says all about its values.
Key plain(std::string_view name, FieldOf field, std::string_view help,
          std::string_view default_text = "") {
  return {.name = name, .field = field, .help = help, .default_text = default_text};
}

std::vector<Key> make_keys() {
  return {
      one_of("model.name", PPFSDP_FIELD(model.name),
             "Named size; the other keys of [model] change what it says.",
             {"debug", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b",
              "llama3-405b"}),
      number("model.dim", PPFSDP_FIELD(model.dim), "", "Width of the residual stream.", 1, 1 << 22),
      number("model.layers", PPFSDP_FIELD(model.layers), "", "Transformer blocks.", 1, 4096),
      number("model.heads", PPFSDP_FIELD(model.heads), "", "Query heads; must divide dim.", 1,
             1 << 22),
      number("model.kv_heads", PPFSDP_FIELD(model.kv_heads), "",
             "Key and value heads; must divide heads.", 1, 1 << 22),
      number("model.hidden", PPFSDP_FIELD(model.hidden), "", "Width of the feed-forward layer.", 1,
             1 << 24),
      number("model.vocab", PPFSDP_FIELD(model.vocab), "tokens",
             "Vocabulary; text is read as bytes and needs 256.", 1, 1 << 26),
      number("model.rope_theta", PPFSDP_FIELD(model.rope_theta), "",
             "Base of the rotary embedding.", 1, kLargest),
      plain("model.tied", PPFSDP_FIELD(model.tied),
            "Whether the output layer's weight is the embedding's."),
      plain(
          "model.weights", PPFSDP_FIELD(model.weights),
          "Initial parameters: a .safetensors file, an index of several (.json), or a folder that "
          "holds model.safetensors or its index; names as in this model.",
          "initial values by training.seed"),
      one_of("model.weights_reader", PPFSDP_FIELD(model.weights_reader),
             "every_rank: each reads its part of the weights. rank_zero: rank 0 reads and sends "
             "the others theirs.",
             {"every_rank", "rank_zero"}),

      one_of("data.kind", PPFSDP_FIELD(data.kind),
             "text: files are read as one token a byte. tokens: files are arrays of little-endian "
             "token ids, mapped into memory.",
             {"text", "tokens"}),
      plain("data.files", PPFSDP_FIELD(data.files),
            "Paths or globs (* ? [] in a name, ** for any number of folders), joined in the "
            "bytewise order of their paths; relative to where the command is run.",
            "LibTorch's C++ headers"),
      one_of("data.dtype", PPFSDP_FIELD(data.dtype), "Type of a token id in files of kind tokens.",
             {"uint16", "uint32"}),
      number("data.seq_len", PPFSDP_FIELD(data.seq_len), "tokens", "Length of a sequence.", 1,
             1 << 24),

      number("training.steps", PPFSDP_FIELD(training.steps), "steps", "Optimizer steps to run.", 1,
             kLargestInt),
      number(
          "training.global_batch", PPFSDP_FIELD(training.global_batch), "sequences",
          "Sequences a step over all ranks and microbatches; ranks x microbatches must divide it.",
          1, 1 << 24),
      number("training.microbatches", PPFSDP_FIELD(training.microbatches), "",
             "Parts that each rank's sequences of a step run in; their gradients are accumulated "
             "and reduced once.",
             1, 1 << 20),
      number("training.seed", PPFSDP_FIELD(training.seed), "",
             "Seed of the initial parameters and of the order of the data.", 0, kLargestInt),
      number("training.max_norm", PPFSDP_FIELD(training.max_norm), "",
             "Gradients are scaled down to this norm; 0 only measures it.", 0, kLargest),
      number("training.norm_type", PPFSDP_FIELD(training.norm_type), "",
             "p of the gradient's p-norm; inf is the largest magnitude.", 0.1, kInfinity),
      plain("training.reproducible_norm", PPFSDP_FIELD(training.reproducible_norm),
            "Whether the norm is that of an exact sum, rounded once, so that equal gradients have "
            "the same norm on any number of ranks."),
      one_of("training.param_dtype", PPFSDP_FIELD(training.param_dtype),
             "Dtype of all-gather and compute; parameters and optimizer stay float32.",
             {"float32", "bfloat16", "float16"}),
      one_of("training.reduce_dtype", PPFSDP_FIELD(training.reduce_dtype),
             "Dtype that gradients are reduced and accumulated in.",
             {"float32", "bfloat16", "float16"}),

      one_of("optimizer.name", PPFSDP_FIELD(optimizer.name), "The optimizer.", {"adamw", "sgd"}),
      number("optimizer.lr", PPFSDP_FIELD(optimizer.lr), "", "Learning rate after warm-up.", 0,
             kLargest),
      number("optimizer.beta1", PPFSDP_FIELD(optimizer.beta1), "",
             "AdamW: decay of the first moment.", 0, 0.9999999999),
      number("optimizer.beta2", PPFSDP_FIELD(optimizer.beta2), "",
             "AdamW: decay of the second moment.", 0, 0.9999999999),
      number("optimizer.eps", PPFSDP_FIELD(optimizer.eps), "", "AdamW: added to the denominator.",
             0, kLargest),
      number("optimizer.weight_decay", PPFSDP_FIELD(optimizer.weight_decay), "",
             "AdamW: decoupled decay; SGD: L2 penalty.", 0, kLargest),
      number("optimizer.momentum", PPFSDP_FIELD(optimizer.momentum), "", "SGD: momentum.", 0,
             kLargest),
      number("optimizer.dampening", PPFSDP_FIELD(optimizer.dampening), "",
             "SGD: what part of a gradient the momentum leaves out.", 0, 1),
      plain("optimizer.nesterov", PPFSDP_FIELD(optimizer.nesterov),
            "SGD: look ahead along the momentum."),
      one_of(
          "optimizer.implementation", PPFSDP_FIELD(optimizer.implementation),
          "foreach: a few operations over all parameters. fused: one. for-loop: a few a parameter.",
          {"foreach", "fused", "for-loop"}),
      number("optimizer.warmup_steps", PPFSDP_FIELD(optimizer.warmup_steps), "steps",
             "Steps over which the learning rate rises linearly to lr.", 0, kLargestInt),
      one_of("optimizer.decay", PPFSDP_FIELD(optimizer.decay),
             "How the learning rate falls from the end of warm-up to the end of training.",
             {"cosine", "linear", "none"}),
      number("optimizer.min_lr_ratio", PPFSDP_FIELD(optimizer.min_lr_ratio), "",
             "What part of lr the decay falls to.", 0, 1),

      number("parallelism.ranks", PPFSDP_FIELD(parallelism.ranks), "ranks",
             "World size on the simulated mesh. Under a launcher the world is WORLD_SIZE; on one "
             "device it is 1.",
             1, 1024),
      plain("parallelism.reshard_after_forward", PPFSDP_FIELD(parallelism.reshard_after_forward),
            "Whether parameters are freed after forward and gathered again in backward. auto: all "
            "but the root's. k: kept sharded over k ranks."),

      one_of(
          "communication.backend", PPFSDP_FIELD(communication.backend),
          "sim: all ranks in this process. nccl: one process and one GPU a rank; gloo: one "
          "process a rank, on CPUs; both are started by a launcher, where the default is nccl if "
          "it can run, else gloo. single: one device, nothing sharded.",
          {"sim", "nccl", "gloo", "single"}),
      number("communication.sim_seed", PPFSDP_FIELD(communication.sim_seed), "",
             "Seed of the simulated mesh's random schedule.", 0, kLargestInt),
      one_of("communication.sim_schedule", PPFSDP_FIELD(communication.sim_schedule),
             "Which simulated rank or stream runs next: those that can, side streams as late as "
             "possible (lazy); all in turn; drawn by sim_seed.",
             {"lazy", "round_robin", "random"}),
      one_of("communication.sim_order", PPFSDP_FIELD(communication.sim_order),
             "Order in which the simulated mesh adds the ranks' values.",
             {"gloo_ring", "rank_order", "nccl_ring", "tree"}),
      plain("communication.sim_poison", PPFSDP_FIELD(communication.sim_poison),
            "Fill freed, fresh and in-flight buffers of the simulated mesh with NaN."),
      number("communication.timeout_s", PPFSDP_FIELD(communication.timeout_s), "seconds",
             "How long a launcher's ranks wait for each other, to meet and in each operation.",
             0.001, 1e9),

      plain("metrics.jsonl", PPFSDP_FIELD(metrics.jsonl),
            "File that gets one JSON object a logged step.", "no file"),
      plain("metrics.tensorboard", PPFSDP_FIELD(metrics.tensorboard),
            "Folder that gets a TensorBoard event file.", "no folder"),
      one_of("metrics.if_exists", PPFSDP_FIELD(metrics.if_exists),
             "When a metrics file is there already: error, append to it, or overwrite it.",
             {"error", "append", "overwrite"}),
      number("metrics.log_every", PPFSDP_FIELD(metrics.log_every), "steps",
             "Steps between two lines of metrics; the last step always gets one.", 1, kLargestInt),
      plain("metrics.progress", PPFSDP_FIELD(metrics.progress),
            "Show a progress bar when standard error is a terminal."),
      number("metrics.peak_tflops", PPFSDP_FIELD(metrics.peak_tflops), "TFLOP/s",
             "Peak speed of all ranks' devices together, for MFU; 0: measured at start as a "
             "float32 matrix product's.",
             0, kLargest),
  };
}

#undef PPFSDP_FIELD

template <typename... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};

std::string quoted_list(const std::vector<std::string_view>& choices) {
  std::string out;
  for (size_t i = 0; i < choices.size(); ++i) {
    out += i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ";
    out += fmt::format("\"{}\"", choices[i]);
  }
  return out;
}

std::string number_as_text(double value) {
  // Whole numbers stand without a fraction here, also for keys that are floats.
  return fmt::format("{}", value);
}

std::string range_text(const Key& key) {
  const bool bounded = key.max < kLargestInt;
  if (bounded) {
    return fmt::format(" from {} to {}", number_as_text(key.min), number_as_text(key.max));
  }
  return fmt::format(" of at least {}", number_as_text(key.min));
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> distance(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        distance[i][j] = i + j;
        continue;
      }
      const size_t replaced = distance[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      distance[i][j] = std::min({distance[i - 1][j] + 1, distance[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        distance[i][j] = std::min(distance[i][j], distance[i - 2][j - 2] + 1);
      }
    }
  }
  return distance[a.size()][b.size()];
}

std::string string_as_toml(const std::string& value) {
  // JSON's strings are TOML's but for DEL, which TOML wants escaped.
  std::string text = nlohmann::json(value).dump();
  for (size_t at = 0; (at = text.find('\x7f', at)) != std::string::npos;) {
    text.replace(at, 1, "\\u007f");
  }
  return text;
}

/// `text` broken into lines of at most `width` characters, each led by `indent` spaces.
std::string wrapped(std::string_view text, size_t indent, size_t width) {
  std::string out, line;
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;) {
    if (!line.empty() && indent + line.size() + 1 + word.size() > width) {
      out += std::string(indent, ' ') + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return out + std::string(indent, ' ') + line + "\n";
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = make_keys();
  return keys;
}

std::string expected_type(const Key& key) {
  Config config;
  const auto integer = [&](auto*) { return "an integer" + range_text(key); };
  const auto number = [&](auto*) {
    const bool takes_infinity = key.max == kInfinity;
    const bool bounded = key.max < kLargestInt;
    return (takes_infinity || bounded ? "a number" : "a finite number") + range_text(key) +
           (takes_infinity ? ", or inf" : "");
  };
  const auto boolean = [](auto*) { return std::string("true or false"); };
  return std::visit(
      Overloaded{
          [&](int64_t* f) { return integer(f); },
          [&](std::optional<int64_t>* f) { return integer(f); },
          [&](double* f) { return number(f); },
          [&](std::optional<double>* f) { return number(f); },
          [&](bool* f) { return boolean(f); },
          [&](std::optional<bool>* f) { return boolean(f); },
          [&](std::string*) {
            return key.choices.empty() ? std::string("a string") : quoted_list(key.choices);
          },
          [](std::vector<std::string>*) { return std::string("a string or a list of strings"); },
          [](ReshardSetting*) {
            return std::string("\"auto\", true, false or an integer of at least 1");
          },
      },
      key.field(config));
}

std::string float_as_toml(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string value_as_toml(const Field& field) {
  return std::visit(Overloaded{
                        [](const int64_t* value) { return fmt::format("{}", *value); },
                        [](const double* value) { return float_as_toml(*value); },
                        [](const bool* value) { return fmt::format("{}", *value); },
                        [](const std::string* value) { return string_as_toml(*value); },
                        [](const std::vector<std::string>* value) {
                          std::vector<std::string> items;
                          for (const std::string& item : *value)
                            items.push_back(string_as_toml(item));
                          return fmt::format("[{}]", fmt::join(items, ", "));
                        },
                        [](const std::optional<int64_t>* value) {
                          return *value ? fmt::format("{}", **value) : std::string();
                        },
                        [](const std::optional<double>* value) {
                          return *value ? float_as_toml(**value) : std::string();
                        },
                        [](const std::optional<bool>* value) {
                          return *value ? fmt::format("{}", **value) : std::string();
                        },
                        [](const ReshardSetting* value) {
                          if (const bool* flag = std::get_if<bool>(value))
                            return fmt::format("{}", *flag);
                          if (const int* ranks = std::get_if<int>(value))
                            return fmt::format("{}", *ranks);
                          return std::string("\"auto\"");
                        },
                    },
                    field);
}

std::string_view nearest(std::string_view word, const std::vector<std::string_view>& candidates) {
  std::string_view best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (std::string_view candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    // A candidate that shares no letter is no suggestion, however short the words are.
    if (distance < best_distance && distance < std::max(word.size(), candidate.size())) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string to_toml(const Config& config) {
  // Fields are addresses, which the reader below does not write through.
  Config copy = config;
  std::string out;
  std::string_view section;
  for (const Key& key : config_keys()) {
    if (key.section() != section) {
      section = key.section();
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
    }
    const std::string value = value_as_toml(key.field(copy));
    if (!value.empty()) out += fmt::format("{} = {}\n", key.key(), value);
  }
  return out;
}

namespace {

// Keys that are unset take what the named size has.
Config with_named_size(Config config) {
  const nn::LlamaConfig size = nn::llama_config(config.model.name);
  config.model.dim = size.dim;
  config.model.layers = size.n_layers;
  config.model.heads = size.n_heads;
  config.model.kv_heads = size.kv_heads();
  config.model.hidden = size.ffn_hidden_dim();
  config.model.vocab = size.vocab_size;
  config.model.rope_theta = size.rope_theta;
  config.model.tied = size.tied_output;
  return config;
}

}  // namespace

std::string describe_keys() {
  Config defaults;
  Config named = with_named_size(defaults);
  std::string out;
  std::string_view section;
  for (const Key& key : config_keys()) {
    if (key.section() != section) {
      section = key.section();
      out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
    }
    std::string value(key.default_text);
    if (value.empty()) value = value_as_toml(key.field(defaults));
    const bool by_name = value.empty();
    if (by_name) value = value_as_toml(key.field(named));
    if (!key.unit.empty()) value += fmt::format(" {}", key.unit);
    if (by_name) value = fmt::format("the named size's ({}: {})", defaults.model.name, value);
    out += fmt::format("  {} = {}\n", key.key(), value);
    out += wrapped(fmt::format("{} Takes {}.", key.help, expected_type(key)), 6, 100);
  }
  return out;
}

}  // namespace ppfsdp::train
