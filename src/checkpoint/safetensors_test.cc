#include "src/checkpoint/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>

namespace ppfsdp::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::filesystem::path path_of(const std::string& name) {
  return std::filesystem::path(::testing::TempDir()) / name;
}

/// A file of these bytes after the header's length.
std::filesystem::path file_of(const std::string& header, const std::string& data,
                              uint64_t length_off_by = 0) {
  const std::filesystem::path path = path_of("case.safetensors");
  std::ofstream out(path, std::ios::binary);
  const uint64_t length = header.size() + length_off_by;
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << header << data;
  return path;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

std::string error_of(const std::string& header, const std::string& data,
                     uint64_t length_off_by = 0) {
  const std::filesystem::path path = file_of(header, data, length_off_by);
  const std::string error = error_of([&] { SafetensorsFile file(path); });
  // Whatever is wrong, the message names the file.
  EXPECT_THAT(error, HasSubstr("case.safetensors"));
  return error;
}

// Every part of every shape: a rank that reads a part must get what it would cut from the whole.
TEST(Safetensors, ReadsParts) {
  const std::filesystem::path path = path_of("parts.safetensors");
  // Bytes of odd counts first in the file make the others' data unaligned.
  const std::vector<std::pair<std::string, at::Tensor>> tensors = {
      {"odd", at::arange(7).to(at::kByte)},
      {"cube", at::arange(60, at::kShort).view({3, 4, 5})},
      {"wide", at::arange(12).to(at::kDouble).view({4, 3})},
      {"no dims", at::full({}, 2.5)},
      {"none", at::empty({0, 3})}};
  save_safetensors(path, tensors);
  const SafetensorsFile file(path);
  for (const auto& [name, whole] : tensors) {
    EXPECT_EQ(file.dtype(name), whole.scalar_type());
    EXPECT_EQ(at::IntArrayRef(file.sizes(name)), whole.sizes());
    const std::vector<int64_t> zeros(whole.dim(), 0);
    const at::Tensor all = at::empty_like(whole);
    file.read(name, zeros, all);
    EXPECT_TRUE(at::equal(all, whole)) << name;
    for (int64_t dim = 0; dim < whole.dim(); ++dim) {
      for (int64_t begin = 0; begin <= whole.size(dim); ++begin) {
        for (int64_t length = 0; length <= whole.size(dim) - begin; ++length) {
          // Cut in one dim, and in the one beside it as well.
          at::Tensor expected = whole.narrow(dim, begin, length);
          std::vector<int64_t> first = zeros;
          first[dim] = begin;
          const int64_t beside = dim + 1;
          for (const bool both : {false, true}) {
            if (both && (beside >= whole.dim() || whole.size(beside) < 2)) continue;
            if (both) {
              expected = expected.narrow(beside, 1, whole.size(beside) - 1);
              first[beside] = 1;
            }
            const at::Tensor part = at::empty(expected.sizes(), whole.options());
            file.read(name, first, part);
            EXPECT_TRUE(at::equal(part, expected)) << name << dim << begin << length << both;
          }
        }
      }
    }
  }
}

TEST(Safetensors, WhatIsNoPartIsRefused) {
  const std::filesystem::path path = path_of("parts.safetensors");
  save_safetensors(path, {{"x", at::arange(6).to(at::kFloat).view({2, 3})}});
  const SafetensorsFile file(path);
  const auto error = [&](at::IntArrayRef begin, const at::Tensor& part) {
    return error_of([&] { file.read("x", begin, part); });
  };
  EXPECT_THAT(error({1, 0}, at::empty({2, 3})),
              HasSubstr("of sizes [2, 3] has no part of sizes [2, 3] at [1, 0]"));
  EXPECT_THAT(error({-1, 0}, at::empty({1, 3})), HasSubstr("has no part"));
  EXPECT_THAT(error({0}, at::empty({2, 3})), HasSubstr("has no part"));
  EXPECT_THAT(error({0, 0}, at::empty({2, 3}, at::kDouble)),
              HasSubstr("contiguous tensor of Float"));
  EXPECT_THAT(error({0, 0}, at::empty({3, 2}).t()), HasSubstr("contiguous tensor of Float"));
  EXPECT_THAT(error_of([&] { file.read("y", {0}, at::empty({1})); }),
              HasSubstr("there is no tensor 'y'"));
  // A file that shrinks after its header was read would end a mapping's reader by a signal.
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
  EXPECT_THAT(error({1, 0}, at::empty({1, 3})), HasSubstr("replaced, changed or cut short since"));
  // Another file under its name may have the tensor elsewhere: its bytes are someone else's.
  save_safetensors(path, {{"w", at::zeros({3})}, {"x", at::zeros({2, 3})}});
  EXPECT_THAT(error({1, 0}, at::empty({1, 3})), HasSubstr("replaced, changed or cut short since"));
  std::filesystem::remove(path);
  EXPECT_THAT(error({1, 0}, at::empty({1, 3})), HasSubstr("can't open"));
}

TEST(Safetensors, WritesWhatItReads) {
  const std::filesystem::path path = path_of("all.safetensors");
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const at::ScalarType dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kComplexFloat}) {
    tensors.emplace_back(std::string("t.") + c10::toString(dtype),
                         at::arange(6).view({2, 3}).to(dtype));
  }
  tensors.emplace_back("empty", at::empty({0, 4}));
  tensors.emplace_back("no dims", at::full({}, 2.5));
  tensors.emplace_back("strided", at::randn({3, 4}).t());
  save_safetensors(path, tensors, {{"format", "pt"}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(file.contains(name)) << name;
    const at::Tensor read = file.tensor(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(read, tensor)) << name;
  }
}

TEST(Safetensors, HeaderIsPaddedSoThatEveryTensorIsAligned) {
  const std::filesystem::path path = path_of("aligned.safetensors");
  save_safetensors(path, {{"b", at::zeros({1}, at::kBool)},
                          {"a", at::zeros({1}, at::kByte)},
                          {"f", at::zeros({3})},
                          {"d", at::zeros({1}, at::kDouble)}});
  const SafetensorsFile file(path);
  EXPECT_THAT(file.names(), ElementsAre("d", "f", "a", "b"));
  std::ifstream in(path, std::ios::binary);
  uint64_t length = 0;
  in.read(reinterpret_cast<char*>(&length), sizeof length);
  EXPECT_EQ(length % 8, 0u);
}

TEST(Safetensors, TensorsOutliveTheFileObjectAndWritesStayOutOfTheFile) {
  const std::filesystem::path path = path_of("private.safetensors");
  save_safetensors(path, {{"x", at::zeros({4})}});
  at::Tensor x;
  {
    const SafetensorsFile file(path);
    x = file.tensor("x");
  }
  x.fill_(1);
  EXPECT_TRUE(at::equal(x, at::full({4}, 1.0)));
  EXPECT_TRUE(at::equal(SafetensorsFile(path).tensor("x"), at::zeros({4})));
}

TEST(Safetensors, MisalignedDataIsReadAllTheSame) {
  // 59 bytes of header put the float at an odd address.
  const std::string header = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}     )";
  ASSERT_EQ(header.size() % 4, 3u);
  const float value = 1.25F;
  std::string data(4, '\0');
  std::memcpy(data.data(), &value, 4);
  const SafetensorsFile file(file_of(header, data));
  EXPECT_EQ(file.tensor("x").item<float>(), 1.25F);
}

TEST(Safetensors, ReplacesAFileWholeAndLeavesNoPart) {
  const std::filesystem::path path = path_of("twice.safetensors");
  save_safetensors(path, {{"x", at::zeros({4})}});
  save_safetensors(path, {{"y", at::zeros({2})}});
  EXPECT_THAT(SafetensorsFile(path).names(), ElementsAre("y"));
  EXPECT_FALSE(std::filesystem::exists(path.string() + ".part"));
}

TEST(SafetensorsErrors, FilesThatAreNone) {
  EXPECT_THAT(error_of([] { SafetensorsFile file("/nowhere/x.safetensors"); }),
              HasSubstr("/nowhere/x.safetensors: can't open: No such file"));
  EXPECT_THAT(error_of([] { SafetensorsFile file("/"); }), HasSubstr("not a regular file"));
  const std::filesystem::path path = path_of("tiny.safetensors");
  std::ofstream(path) << "abc";
  EXPECT_THAT(error_of([&] { SafetensorsFile file(path); }), HasSubstr("cut short at offset 3"));
  std::ofstream(path, std::ios::trunc).close();
  EXPECT_THAT(error_of([&] { SafetensorsFile file(path); }), HasSubstr("cut short at offset 0"));
}

TEST(SafetensorsErrors, Header) {
  EXPECT_THAT(error_of("{}", "", 5), HasSubstr("header is cut short at offset 10"));
  EXPECT_THAT(error_of("{}", "", ~uint64_t{0} - 4), HasSubstr("header is cut short"));
  EXPECT_THAT(error_of(R"({"x": nonsense})", ""), HasSubstr("not JSON at offset 15"));
  EXPECT_THAT(error_of("", ""), HasSubstr("not JSON at offset 8"));
  EXPECT_THAT(error_of(R"({"x":1e999})", ""), HasSubstr("not JSON at offset"));
  EXPECT_THAT(error_of(R"({"x":{"dtype":)" + std::string(1000000, '['), ""),
              HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("[1]", ""), HasSubstr("must be a JSON object, is array"));
  EXPECT_THAT(error_of(R"({"__metadata__":{"a":1}})", ""), HasSubstr("'a' must be a string"));
  EXPECT_THAT(error_of(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                       "a"),
              HasSubstr("the header names 'x' twice"));
}

TEST(SafetensorsErrors, Entry) {
  const auto entry = [](const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return R"({"x":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}}";
  };
  EXPECT_THAT(error_of(R"({"x":{"shape":[1],"data_offsets":[0,1]}})", "a"),
              HasSubstr("tensor 'x' in the header (offset 8) has no dtype"));
  EXPECT_THAT(error_of(R"({"x":3})", "a"), HasSubstr("has no dtype"));
  EXPECT_THAT(error_of(entry("F31", "[1]", "[0,4]"), "abcd"), HasSubstr("unknown dtype \"F31\""));
  EXPECT_THAT(error_of(entry("F32", "4", "[0,4]"), "abcd"), HasSubstr("shape must be a list"));
  EXPECT_THAT(error_of(entry("F32", "[-1]", "[0,4]"), "abcd"), HasSubstr("the shape holds -1"));
  EXPECT_THAT(error_of(entry("F32", "[1.5]", "[0,4]"), "abcd"), HasSubstr("the shape holds 1.5"));
  EXPECT_THAT(error_of(entry("F32", "[4294967296,4294967296]", "[0,4]"), "abcd"),
              HasSubstr("shape is too large"));
  EXPECT_THAT(error_of(entry("F32", "[18446744073709551615]", "[0,4]"), "abcd"),
              HasSubstr("shape is too large"));
  EXPECT_THAT(error_of(entry("F32", "[1]", "[0]"), "abcd"), HasSubstr("must be a list of two"));
  EXPECT_THAT(error_of(entry("F32", "[1]", "[4,0]"), "abcd"), HasSubstr("[4, 0] run backwards"));
  const std::string fits = entry("F32", "[1]", "[0,4]");
  EXPECT_THAT(error_of(fits, "abc"),
              HasSubstr("the data is cut short at offset " + std::to_string(8 + fits.size() + 3)));
  EXPECT_THAT(error_of(entry("F32", "[2]", "[0,4]"), "abcd"),
              HasSubstr("has 4 bytes of data; its shape and dtype F32 need 8"));
  EXPECT_THAT(error_of(fits, "abcde"), HasSubstr("belong to no tensor"));
}

TEST(SafetensorsErrors, TensorsThatOverlapOrLeaveAHole) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(SafetensorsFile(file_of(two("[2,4]", "[0,2]"), "abcd")).names(),
            (std::vector<std::string>{"b", "a"}));
  EXPECT_THAT(error_of(two("[0,2]", "[1,3]"), "abc"), HasSubstr("'a' and 'b' overlap"));
  EXPECT_THAT(error_of(two("[0,2]", "[3,5]"), "abcde"), HasSubstr("belong to no tensor"));
}

TEST(SafetensorsErrors, EveryCutOfAFileIsAnErrorAndNotACrash) {
  const std::filesystem::path whole = path_of("whole.safetensors");
  save_safetensors(whole, {{"x", at::zeros({3})}, {"y", at::zeros({2}, at::kLong)}});
  std::ifstream in(whole, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  const std::filesystem::path cut = path_of("cut.safetensors");
  for (size_t length = 0; length < bytes.size(); ++length) {
    std::ofstream(cut, std::ios::binary | std::ios::trunc) << bytes.substr(0, length);
    EXPECT_THAT(error_of([&] { SafetensorsFile file(cut); }), HasSubstr("cut short")) << length;
  }
}

TEST(SafetensorsErrors, Writing) {
  const std::filesystem::path path = path_of("bad.safetensors");
  EXPECT_THAT(error_of([&] {
                save_safetensors(path, {{"x", at::Tensor()}});
              }),
              HasSubstr("tensor 'x' has no memory on the CPU"));
  EXPECT_THAT(error_of([&] {
                save_safetensors(path, {{"x", at::empty({1}, at::kMeta)}});
              }),
              HasSubstr("tensor 'x' has no memory on the CPU"));
  EXPECT_THAT(error_of([&] {
                save_safetensors(path, {{"x", at::zeros({1})}, {"x", at::zeros({1})}});
              }),
              HasSubstr("two tensors are called 'x'"));
  EXPECT_THAT(error_of([&] {
                save_safetensors(path, {{"", at::zeros({1})}});
              }),
              HasSubstr("can't be called ''"));
  EXPECT_THAT(error_of([&] {
                save_safetensors(path, {{"x", at::zeros({1}, at::kComplexDouble)}});
              }),
              HasSubstr("is ComplexDouble"));
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_THAT(error_of([] {
                save_safetensors("/nowhere/x", {{"x", at::zeros({1})}});
              }),
              HasSubstr("can't create /nowhere/x.part"));
}

}  // namespace
}  // namespace ppfsdp::checkpoint
