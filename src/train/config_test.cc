#include "src/train/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "src/train/config_error.h"
#include "src/train/config_keys.h"

namespace ppfsdp::train {
namespace {

Config parse(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  return parse_config(toml, "a.toml", overrides).config;
}

/// The message of the ConfigError that parsing raises; empty when it raises none.
std::string error_of(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  try {
    parse(toml, overrides);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

std::string override_error(const std::string& text) { return error_of("", {text}); }

// Values of every type must land in their own field and nothing else may change.
TEST(ConfigTest, reads_every_type_and_keeps_other_defaults) {
  const Config config = parse(R"(
[model]
dim = 96
rope_theta = 500000
tied = true
[data]
files = ["a.txt", "b/**/*.h"]
[training]
norm_type = inf
reproducible_norm = true
[optimizer]
name = "sgd"
lr = 1
[parallelism]
reshard_after_forward = 2
[communication]
sim_poison = false
)");
  Config expected;
  expected.model.dim = 96;
  expected.model.rope_theta = 500000.0;
  expected.model.tied = true;
  expected.data.files = {"a.txt", "b/**/*.h"};
  expected.training.norm_type = std::numeric_limits<double>::infinity();
  expected.training.reproducible_norm = true;
  expected.optimizer.name = "sgd";
  expected.optimizer.lr = 1.0;
  expected.parallelism.reshard_after_forward = 2;
  expected.communication.sim_poison = false;
  EXPECT_EQ(config, expected);
}

TEST(ConfigTest, reshard_takes_auto_a_boolean_or_ranks) {
  const auto reshard = [](const std::string& value) {
    return parse("", {"parallelism.reshard_after_forward=" + value})
        .parallelism.reshard_after_forward;
  };
  EXPECT_EQ(reshard("true"), ReshardSetting(true));
  EXPECT_EQ(reshard("false"), ReshardSetting(false));
  EXPECT_EQ(reshard("4"), ReshardSetting(4));
  EXPECT_EQ(reshard("auto"), ReshardSetting());
  EXPECT_EQ(reshard("\"auto\""), ReshardSetting());
  EXPECT_EQ(override_error("parallelism.reshard_after_forward=0"),
            "--set parallelism.reshard_after_forward=0: parallelism.reshard_after_forward must be "
            "\"auto\", true, false or an integer of at least 1, got the integer 0");
}

// An override must win over the file, and strings must not need a shell's double quoting.
TEST(ConfigTest, overrides_win_and_take_bare_strings) {
  const Config config = parse("[training]\nsteps = 3\n[model]\nname = \"debug\"",
                              {"training.steps=7", "model.name=llama3-8b", "data.files=a b.txt",
                               "metrics.jsonl=12", "data.kind=\"tokens\""});
  EXPECT_EQ(config.training.steps, 7);
  EXPECT_EQ(config.model.name, "llama3-8b");
  EXPECT_EQ(config.data.files, std::vector<std::string>{"a b.txt"});
  EXPECT_EQ(config.metrics.jsonl, "12");
  EXPECT_EQ(config.data.kind, "tokens");
  EXPECT_EQ(parse("", {"data.files=[\"x\", 'y']"}).data.files,
            (std::vector<std::string>{"x", "y"}));
}

// The CLI decides by it what may be implied; a default must never look as if the user had asked.
TEST(ConfigTest, given_names_what_file_and_overrides_set) {
  const LoadedConfig loaded =
      parse_config("[training]\nsteps = 60", "a.toml", {"communication.backend=sim"});
  EXPECT_EQ(loaded.given, (std::set<std::string>{"training.steps", "communication.backend"}));
}

TEST(ConfigTest, unknown_key_names_line_and_nearest) {
  EXPECT_EQ(error_of("[training]\nsteps = 3\nmax_nrom = 2.0"),
            "a.toml:3: there is no key training.max_nrom; did you mean training.max_norm?");
  EXPECT_EQ(override_error("training.stesp=3"),
            "--set training.stesp=3: there is no key training.stesp; did you mean training.steps?");
}

TEST(ConfigTest, key_of_another_section_is_found) {
  EXPECT_EQ(error_of("[training]\nlr = 3"),
            "a.toml:2: there is no key training.lr; did you mean optimizer.lr?");
  EXPECT_EQ(error_of("lr = 3"),
            "a.toml:1: the key lr stands outside any section; write it under [optimizer]");
}

TEST(ConfigTest, far_off_key_lists_the_section) {
  EXPECT_EQ(error_of("[parallelism]\nzzzzzzzz = 3"),
            "a.toml:2: there is no key parallelism.zzzzzzzz; the keys of [parallelism] are ranks, "
            "reshard_after_forward");
}

TEST(ConfigTest, unknown_section) {
  EXPECT_EQ(error_of("[trainig]\nx = 3"),
            "a.toml:2: there is no section [trainig]; did you mean [training]?");
  // An empty one has no key that would be found wrong.
  EXPECT_EQ(error_of("\n[trainig]"),
            "a.toml:2: there is no section [trainig]; did you mean [training]?");
  EXPECT_EQ(error_of("[[training]]\nsteps = 1"),
            "a.toml:1: [training] must be one section of keys, got a list");
}

TEST(ConfigTest, wrong_type_says_what_was_got) {
  EXPECT_EQ(error_of("[training]\nsteps = \"ten\""),
            "a.toml:2: training.steps must be an integer of at least 1, got the string \"ten\"");
  EXPECT_EQ(error_of("[training]\nsteps = 10.0"),
            "a.toml:2: training.steps must be an integer of at least 1, got the number 10.0");
  EXPECT_EQ(error_of("[model]\ntied = 1"),
            "a.toml:2: model.tied must be true or false, got the integer 1");
  EXPECT_EQ(error_of("[data]\nfiles = [\"a\", 2]"),
            "a.toml:2: data.files must be a string or a list of strings, got a list with the "
            "integer 2 in it");
  EXPECT_EQ(error_of("[training.steps]\na = 1"),
            "a.toml:1: training.steps must be an integer of at least 1, got a table");
  EXPECT_EQ(override_error("training.steps=ten"),
            "--set training.steps=ten: training.steps must be an integer of at least 1, got 'ten'");
  EXPECT_EQ(override_error("training.steps="),
            "--set training.steps=: training.steps must be an integer of at least 1, got ''");
}

TEST(ConfigTest, out_of_range) {
  EXPECT_EQ(error_of("[training]\nsteps = 0"),
            "a.toml:2: training.steps must be an integer of at least 1, got the integer 0");
  EXPECT_EQ(error_of("[optimizer]\nmin_lr_ratio = 1.5"),
            "a.toml:2: optimizer.min_lr_ratio must be a number from 0 to 1, got the number 1.5");
  // NaN compares false with both bounds and must still be refused; inf is a norm but no rate.
  EXPECT_NE(error_of("[optimizer]\nlr = nan"), "");
  EXPECT_NE(error_of("[optimizer]\nlr = inf"), "");
  EXPECT_EQ(error_of("[training]\nnorm_type = inf"), "");
}

TEST(ConfigTest, wrong_choice_names_nearest) {
  EXPECT_EQ(error_of("[optimizer]\nname = \"adam\""),
            "a.toml:2: optimizer.name must be \"adamw\" or \"sgd\", got the string \"adam\"; did "
            "you mean \"adamw\"?");
}

TEST(ConfigTest, key_given_twice) {
  EXPECT_NE(error_of("[training]\nsteps = 1\nsteps = 2").find("a.toml:3: "), std::string::npos);
  EXPECT_EQ(error_of("", {"training.steps=1", "training.steps=2"}),
            "--set training.steps=2: training.steps is set twice");
}

TEST(ConfigTest, text_that_is_no_toml_names_the_line) {
  const std::string error = error_of("[training]\nsteps 3\n");
  EXPECT_EQ(error.rfind("a.toml:2: ", 0), 0u) << error;
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
}

TEST(ConfigTest, malformed_overrides) {
  for (const std::string text : {"steps=1", "training.steps", ".steps=1", "training.=1", ""}) {
    EXPECT_EQ(
        override_error(text),
        "--set " + text + ": an override is section.key=value, as in --set training.steps=10");
  }
}

TEST(ConfigTest, files_that_can_not_be_read) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("config_test.{}", getpid());
  std::filesystem::create_directories(folder);
  const auto load_error = [](const std::string& path) -> std::string {
    try {
      load_config(path, {});
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  const std::string missing = (folder / "missing.toml").string();
  EXPECT_EQ(load_error(missing), missing + ": No such file or directory");
  EXPECT_EQ(load_error(folder.string()),
            folder.string() + ": is a folder; a config is a TOML file");
  const std::string empty = (folder / "empty.toml").string();
  std::ofstream(empty).flush();
  EXPECT_EQ(load_config(empty, {}).config, Config()) << "an empty file is all defaults";
  std::filesystem::remove_all(folder);
}

TEST(ConfigKeysTest, nearest_counts_a_swap_as_one_edit_and_gives_up_far_off) {
  EXPECT_EQ(nearest("stpes", {"seed", "steps"}), "steps");
  EXPECT_EQ(nearest("xyzzy", {"seed", "steps"}), "");
  EXPECT_EQ(nearest("q", {"lr"}), "");
}

// A default outside its own range would be refused when it is written down in a file.
TEST(ConfigKeysTest, defaults_survive_their_own_table) {
  EXPECT_EQ(parse(to_toml(Config())), Config());
}

// --help must list each key once, with its unit and default.
TEST(ConfigKeysTest, description_lists_each_key) {
  const std::string text = describe_keys();
  for (const Key& key : config_keys()) {
    EXPECT_NE(text.find(fmt::format("\n  {} = ", key.key())), std::string::npos) << key.name;
    EXPECT_FALSE(key.help.empty()) << key.name;
  }
  EXPECT_NE(text.find("  steps = 60 steps\n"), std::string::npos);
  EXPECT_NE(text.find("  files = LibTorch's C++ headers\n"), std::string::npos);
  // What is unset says where its value comes from, and which that is by default.
  for (const char* line :
       {"dim = the named size's (debug: 128)", "layers = the named size's (debug: 4)",
        "heads = the named size's (debug: 4)", "kv_heads = the named size's (debug: 2)",
        "hidden = the named size's (debug: 352)", "vocab = the named size's (debug: 256 tokens)",
        "rope_theta = the named size's (debug: 10000.0)",
        "tied = the named size's (debug: false)"}) {
    EXPECT_NE(text.find(fmt::format("\n  {}\n", line)), std::string::npos) << line << "\n" << text;
  }
}

// Draws a valid value for the field by its type and the table's range and choices.
void draw(const Key& key, const Field& field) {
  const auto integer = [&] {
    return *rc::gen::inRange<int64_t>(static_cast<int64_t>(key.min),
                                      static_cast<int64_t>(std::min(key.max, 1e15)) + 1);
  };
  const auto number = [&] {
    const double unit = static_cast<double>(*rc::gen::inRange<int64_t>(0, 1000003)) / 1000003;
    return key.min + unit * (std::min(key.max, 1e6) - key.min);
  };
  // TOML is UTF-8: control characters, quotes and backslashes, and now and then a longer character.
  const auto text = [] {
    return *rc::gen::container<std::string>(rc::gen::inRange<char>(1, 127)) +
           *rc::gen::element<std::string>("", "\u00e9", "\x7f");
  };
  struct {
    const Key& key;
    decltype(integer)& draw_integer;
    decltype(number)& draw_number;
    decltype(text)& draw_text;
    void operator()(int64_t* f) const { *f = draw_integer(); }
    void operator()(std::optional<int64_t>* f) const {
      if (*rc::gen::arbitrary<bool>()) *f = draw_integer();
    }
    void operator()(double* f) const { *f = draw_number(); }
    void operator()(std::optional<double>* f) const {
      if (*rc::gen::arbitrary<bool>()) *f = draw_number();
    }
    void operator()(bool* f) const { *f = *rc::gen::arbitrary<bool>(); }
    void operator()(std::optional<bool>* f) const {
      if (*rc::gen::arbitrary<bool>()) *f = *rc::gen::arbitrary<bool>();
    }
    void operator()(std::string* f) const {
      *f = key.choices.empty() ? draw_text() : std::string(*rc::gen::elementOf(key.choices));
    }
    void operator()(std::vector<std::string>* f) const {
      const int count = *rc::gen::inRange(0, 4);
      for (int i = 0; i < count; ++i) f->push_back(draw_text());
    }
    void operator()(ReshardSetting* f) const {
      switch (*rc::gen::inRange(0, 3)) {
        case 0:
          *f = std::monostate{};
          break;
        case 1:
          *f = *rc::gen::arbitrary<bool>();
          break;
        default:
          *f = *rc::gen::inRange(1, 1 << 20);
      }
    }
  } visitor{key, integer, number, text};
  std::visit(visitor, field);
}

// What a run reports as its config must be that config: any valid one, strings of any ASCII
// included.
TEST(ConfigKeysTest, to_toml_round_trips) {
  EXPECT_TRUE(rc::check([] {
    Config config;
    for (const Key& key : config_keys()) draw(key, key.field(config));
    RC_ASSERT(parse(to_toml(config)) == config);
  }));
}

}  // namespace
}  // namespace ppfsdp::train
