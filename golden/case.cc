#include "golden/case.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/randint.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "src/checkpoint/safetensors.h"
#include "src/nn/llama.h"

namespace ppfsdp::golden {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kKernels = "kernels";

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {{"bfloat16", at::kBFloat16},
                                                              {"float16", at::kHalf},
                                                              {"float32", at::kFloat},
                                                              {"float64", at::kDouble}};

/// Python writes the floats that JSON lacks as bare words; here they become strings.
std::string quote_bare_floats(const std::string& text) {
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    bool quoted = false;
    for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
      if (in_string || text.compare(i, word.size(), word) != 0) continue;
      result += fmt::format("\"{}\"", word);
      i += word.size();
      quoted = true;
      break;
    }
    if (quoted) continue;
    if (in_string && text[i] == '\\' && i + 1 < text.size()) result += text[i++];
    if (text[i] == '"') in_string = !in_string;
    result += text[i++];
  }
  return result;
}

double to_double(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  TORCH_CHECK(false, "must be a number");
}

Json from_double(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

int64_t to_integer(const Json& value) {
  TORCH_CHECK(value.is_number_integer(), "must be an integer");
  TORCH_CHECK(!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX,
              "must be below 2^63");
  return value.get<int64_t>();
}

bool to_bool(const Json& value) {
  TORCH_CHECK(value.is_boolean(), "must be true or false");
  return value.get<bool>();
}

std::string to_string(const Json& value) {
  TORCH_CHECK(value.is_string(), "must be a string");
  return value.get<std::string>();
}

std::optional<at::ScalarType> to_dtype(const Json& value) {
  const std::string name = to_string(value);
  if (name.empty()) return std::nullopt;
  for (const auto& [known, dtype] : kDtypes) {
    if (name == known) return dtype;
  }
  TORCH_CHECK(false, "must be \"\", \"bfloat16\", \"float16\", \"float32\" or \"float64\"");
}

Json from_dtype(const std::optional<at::ScalarType>& dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (dtype == known) return name;
  }
  return "";
}

/// A field of a case file, read into and written from a Case.
struct Field {
  const char* name;
  std::function<void(Case&, const Json&)> read;
  std::function<Json(const Case&)> write;
};

template <typename T, typename Read>
Field field(const char* name, T Case::*member, Read read) {
  return {name, [=](Case& c, const Json& value) { c.*member = read(value); },
          [=](const Case& c) { return Json(c.*member); }};
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all = {
      field("world", &Case::world, to_integer),
      field("replicate", &Case::replicate, to_integer),
      field("vocab", &Case::vocab, to_integer),
      field("dim", &Case::dim, to_integer),
      field("heads", &Case::heads, to_integer),
      field("kv_heads", &Case::kv_heads, to_integer),
      field("layers", &Case::layers, to_integer),
      field("hidden", &Case::hidden, to_integer),
      field("batch", &Case::batch, to_integer),
      field("seq", &Case::seq, to_integer),
      field("steps", &Case::steps, to_integer),
      field("accumulate", &Case::accumulate, to_integer),
      {"reshard",
       [](Case& c, const Json& value) {
         if (value.is_boolean()) {
           c.reshard = value.get<bool>();
         } else {
           TORCH_CHECK(value.is_number_integer(), "must be true, false or an integer");
           c.reshard = value.get<int64_t>();
         }
       },
       [](const Case& c) { return std::visit([](auto value) { return Json(value); }, c.reshard); }},
      {"param_dtype", [](Case& c, const Json& value) { c.param_dtype = to_dtype(value); },
       [](const Case& c) { return from_dtype(c.param_dtype); }},
      {"reduce_dtype", [](Case& c, const Json& value) { c.reduce_dtype = to_dtype(value); },
       [](const Case& c) { return from_dtype(c.reduce_dtype); }},
      field("clip", &Case::clip, to_double),
      {"norm_type", [](Case& c, const Json& value) { c.norm_type = to_double(value); },
       [](const Case& c) { return from_double(c.norm_type); }},
      field("foreach", &Case::foreach, to_bool),
      field("optimizer", &Case::optimizer, to_string),
      field("lr", &Case::lr, to_double),
      field("frozen", &Case::frozen, to_string),
      field("tied", &Case::tied, to_bool),
      field("seed", &Case::seed, to_integer),
  };
  return all;
}

Json parse(const std::filesystem::path& path) {
  TORCH_CHECK(!std::filesystem::is_directory(path), path.string(),
              ": is a folder; a case is a JSON file");
  std::ifstream in(path, std::ios::binary);
  TORCH_CHECK(in, path.string(), ": can't open");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  TORCH_CHECK(!in.bad() && !text.empty(), path.string(),
              text.empty() ? ": the file is empty" : ": can't read");
  try {
    return Json::parse(quote_bare_floats(text));
  } catch (const Json::parse_error& error) {
    TORCH_CHECK(false, path.string(), ": not JSON, or cut short: ", error.what());
  }
}

const Json& member(const Json& object, const char* name, const std::filesystem::path& path) {
  TORCH_CHECK(object.is_object() && object.contains(name), path.string(), ": there is no \"", name,
              "\"");
  return object.at(name);
}

Case parse_case(const Json& document, const std::filesystem::path& path) {
  const Json& object = member(document, "case", path);
  TORCH_CHECK(object.is_object(), path.string(), ": \"case\" must be an object");
  Case result;
  std::set<std::string> known;
  for (const Field& each : fields()) {
    known.insert(each.name);
    if (!object.contains(each.name)) continue;
    try {
      each.read(result, object.at(each.name));
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, path.string(), ": case.", each.name, " is ", object.at(each.name).dump(),
                  ", ", error.what_without_backtrace());
    }
  }
  for (const auto& item : object.items()) {
    TORCH_CHECK(known.contains(item.key()), path.string(), ": case.", item.key(),
                " is no field of a case");
  }
  try {
    result.validate();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, path.string(), ": ", error.what_without_backtrace());
  }
  return result;
}

std::vector<ExpectedStep> parse_steps(const Json& document, const Case& config,
                                      const std::filesystem::path& path) {
  const Json& list = member(document, "steps", path);
  TORCH_CHECK(list.is_array() && list.size() == static_cast<size_t>(config.steps), path.string(),
              ": \"steps\" must be a list of case.steps = ", config.steps, " entries");
  std::vector<ExpectedStep> result;
  for (const Json& entry : list) {
    const auto bad = [&](const char* what) {
      return fmt::format("{}: step {}: {}", path.string(), result.size(), what);
    };
    try {
      ExpectedStep step;
      step.loss = to_double(member(entry, "loss", path));
      for (const Json& loss : member(entry, "loss_per_rank", path)) {
        step.loss_per_rank.push_back(to_double(loss));
      }
      TORCH_CHECK(step.loss_per_rank.size() == static_cast<size_t>(config.world),
                  "loss_per_rank must have one number a rank");
      const Json& norm = member(entry, "grad_norm", path);
      if (!norm.is_null()) step.grad_norm = to_double(norm);
      TORCH_CHECK(step.grad_norm.has_value() == (config.clip != 0),
                  "grad_norm must be a number if and only if case.clip is not 0");
      result.push_back(std::move(step));
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, bad(error.what_without_backtrace()));
    }
  }
  return result;
}

/// A tensor that must have these sizes and this dtype.
at::Tensor take(const checkpoint::SafetensorsFile& file, const std::string& name,
                at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::Tensor tensor = file.tensor(name);
  TORCH_CHECK(tensor.sizes() == sizes && tensor.scalar_type() == dtype, file.path().string(),
              ": tensor '", name, "' is ", tensor.scalar_type(), " ", tensor.sizes(),
              "; the case needs ", dtype, " ", sizes);
  return tensor;
}

at::Tensor take_tokens(const checkpoint::SafetensorsFile& file, const std::string& name,
                       const Case& config) {
  const at::Tensor tokens =
      take(file, name, {config.accumulate, config.world, config.batch, config.seq}, at::kLong);
  const int64_t low = tokens.min().item<int64_t>(), high = tokens.max().item<int64_t>();
  TORCH_CHECK(low >= 0 && high < config.vocab, file.path().string(), ": tensor '", name,
              "' holds the token ", low < 0 ? low : high, "; the vocabulary is 0 to ",
              config.vocab - 1);
  return tokens;
}

bool is_frozen(const Case& config, const std::string& name) {
  return !config.frozen.empty() && name.find(config.frozen) != std::string::npos;
}

void check_positive(const char* name, int64_t value) {
  TORCH_CHECK(value > 0, "case.", name, " is ", value, ", must be positive");
}

}  // namespace

nn::LlamaConfig Case::model() const {
  return {.vocab_size = vocab,
          .dim = dim,
          .n_layers = layers,
          .n_heads = heads,
          .n_kv_heads = kv_heads,
          .hidden_dim = hidden,
          .max_seq_len = seq,
          .tied_output = tied};
}

void Case::validate() const {
  check_positive("world", world);
  check_positive("replicate", replicate);
  TORCH_CHECK(world <= 1024, "case.world is ", world, ", must be at most 1024");
  // Far above any case, and small enough for the sizes of all tensors to be computed.
  constexpr int64_t kLargest = int64_t{1} << 24;
  for (const auto& [name, value] : {std::pair("vocab", vocab),
                                    {"dim", dim},
                                    {"hidden", hidden},
                                    {"layers", layers},
                                    {"batch", batch},
                                    {"seq", seq},
                                    {"accumulate", accumulate}}) {
    TORCH_CHECK(value <= kLargest, "case.", name, " is ", value, ", must be at most ", kLargest);
  }
  check_positive("kv_heads", kv_heads);
  check_positive("hidden", hidden);
  check_positive("batch", batch);
  check_positive("steps", steps);
  check_positive("accumulate", accumulate);
  model().validate();
  TORCH_CHECK(replicate == 1, "case.replicate is ", replicate,
              ": replication (HSDP) is not supported yet, only 1");
  TORCH_CHECK(clip >= 0, "case.clip is ", clip, ", must be positive, or 0 for none");
  TORCH_CHECK(norm_type > 0, "case.norm_type is ", norm_type, ", must be positive or infinity");
  TORCH_CHECK(lr >= 0 && std::isfinite(lr), "case.lr is ", lr, ", must not be negative");
  TORCH_CHECK(optimizer == "adamw" || optimizer == "sgd", "case.optimizer is \"", optimizer,
              "\", must be \"adamw\" or \"sgd\"");
  if (const int64_t* size = std::get_if<int64_t>(&reshard)) {
    TORCH_CHECK(*size > 0 && world % *size == 0, "case.reshard is ", *size,
                ", must be true, false or a divisor of world ", world);
  }
}

std::filesystem::path tensors_beside(const std::filesystem::path& json) {
  return std::filesystem::path(json).replace_extension(".safetensors");
}

Case read_case(const std::filesystem::path& json) { return parse_case(parse(json), json); }

Recording read_recording(const std::filesystem::path& json) {
  Recording recording;
  const Json document = parse(json);
  recording.name = json.stem().string();
  recording.config = parse_case(document, json);
  recording.outputs.steps = parse_steps(document, recording.config, json);
  const Case& config = recording.config;
  const checkpoint::SafetensorsFile file(tensors_beside(json));
  const auto kernels = file.metadata().find(kKernels);
  if (kernels != file.metadata().end()) recording.kernels = kernels->second;
  for (int64_t step = 0; step < config.steps; ++step) {
    recording.inputs.tokens.push_back(take_tokens(file, fmt::format("tokens/{}", step), config));
    recording.inputs.labels.push_back(take_tokens(file, fmt::format("labels/{}", step), config));
  }
  // A model on the meta device has the names and sizes, and no values.
  nn::Llama model(config.model(), at::kMeta);
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    const auto parameter = [&](const std::string& prefix) {
      return take(file, prefix + name, item.value().sizes(), at::kFloat);
    };
    recording.inputs.init[name] = parameter("init/");
    recording.outputs.final[name] = parameter("final/");
    if (is_frozen(config, name)) continue;
    for (const int64_t step : std::set<int64_t>{0, config.steps - 1}) {
      recording.outputs.grads[step][name] = parameter(fmt::format("grad/{}/", step));
    }
  }
  TORCH_CHECK(!recording.outputs.grads.empty(), json.string(), ": case.frozen is \"", config.frozen,
              "\", which leaves no parameter to train");
  return recording;
}

void write_recording(const Recording& recording, const std::filesystem::path& json) {
  Json document;
  for (const Field& each : fields()) document["case"][each.name] = each.write(recording.config);
  for (const ExpectedStep& step : recording.outputs.steps) {
    Json losses = Json::array();
    for (const double loss : step.loss_per_rank) losses.push_back(from_double(loss));
    document["steps"].push_back(
        {{"loss", from_double(step.loss)},
         {"loss_per_rank", losses},
         {"grad_norm", step.grad_norm ? from_double(*step.grad_norm) : Json()}});
  }
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, value] : recording.inputs.init)
    tensors.emplace_back("init/" + name, value);
  for (size_t step = 0; step < recording.inputs.tokens.size(); ++step) {
    tensors.emplace_back(fmt::format("tokens/{}", step), recording.inputs.tokens[step]);
    tensors.emplace_back(fmt::format("labels/{}", step), recording.inputs.labels[step]);
  }
  for (const auto& [step, grads] : recording.outputs.grads) {
    for (const auto& [name, grad] : grads) {
      tensors.emplace_back(fmt::format("grad/{}/{}", step, name), grad);
    }
  }
  for (const auto& [name, value] : recording.outputs.final) {
    tensors.emplace_back("final/" + name, value);
  }
  checkpoint::save_safetensors(tensors_beside(json), tensors, {{kKernels, recording.kernels}});
  std::ofstream out(json, std::ios::trunc);
  out << document.dump(1) << "\n";
  out.close();
  TORCH_CHECK(out, json.string(), ": can't write");
}

Inputs make_inputs(const Case& config, int64_t steps) {
  Inputs inputs;
  at::manual_seed(config.seed);
  nn::Llama model(config.model());
  for (const auto& item : model->named_parameters()) {
    inputs.init[item.key()] = item.value().detach();
  }
  at::Generator generator = at::detail::createCPUGenerator(config.seed + 1);
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor data =
        at::randint(config.vocab, {config.accumulate, config.world, config.batch, config.seq + 1},
                    generator, at::kLong);
    inputs.tokens.push_back(data.narrow(-1, 0, config.seq).contiguous());
    inputs.labels.push_back(data.narrow(-1, 1, config.seq).contiguous());
  }
  return inputs;
}

}  // namespace ppfsdp::golden
