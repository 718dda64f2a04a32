// The safetensors reader, mostly on files that somebody broke.
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "support/catch.hpp"
#include "support/safetensors.hpp"

namespace rapt::testing {
namespace {

/// A file of this test that goes away with it.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content)
      : path_(std::filesystem::temp_directory_path() /
              ("rapt_test_" + std::to_string(::getpid()) + "_" + std::to_string(++count_) + ".safetensors")) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  static inline int count_ = 0;
  std::filesystem::path path_;
};

std::string prefix(std::uint64_t header_bytes) {
  std::string bytes(sizeof header_bytes, '\0');
  std::memcpy(bytes.data(), &header_bytes, sizeof header_bytes);
  return bytes;
}

/// A file with this header and `data_bytes` zeros behind it.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  return prefix(header.size()) + header + std::string(data_bytes, '\0');
}

/// What load() says about a file; empty if it takes it.
std::string reason(const std::string& content) {
  const TemporaryFile file(content);
  try {
    SafeTensors::load(file.path());
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    CHECK(text.rfind(file.path().string() + ": ", 0) == 0);
    return text.substr(std::min(text.size(), file.path().string().size() + 2));
  }
  return {};
}

/// What load() says about one tensor of this description with `data_bytes` of data.
std::string tensor_reason(const std::string& description, std::size_t data_bytes) {
  return reason(file_of("{\"t\":" + description + "}", data_bytes));
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("safetensors: every dtype, shapes, values and metadata", "[safetensors]") {
  const std::string header = R"({"__metadata__":{"model":"a \"name\"","text":"\u00e9"},)"
                             R"("f":{"dtype":"F32","shape":[2,1,3],"data_offsets":[8,32]},)"
                             R"("l":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
                             R"("i":{"dtype":"I32","shape":[1,1,1,1],"data_offsets":[32,36]},)"
                             R"("none":{"dtype":"F32","shape":[4,0],"data_offsets":[36,36]},)"
                             R"("m":{"dtype":"BOOL","shape":[3],"data_offsets":[36,39]}}   )";
  std::string data(39, '\0');
  const std::int64_t l = -5'000'000'000;
  const float f[6] = {1, 2, 3, 4, 5, -6.5f};
  const std::int32_t i = -7;
  std::memcpy(data.data(), &l, 8);
  std::memcpy(data.data() + 8, f, 24);
  std::memcpy(data.data() + 32, &i, 4);
  data[37] = 1;
  const TemporaryFile temporary(prefix(header.size()) + header + data);

  SafeTensors loaded = SafeTensors::load(temporary.path());
  const SafeTensors file = std::move(loaded);  // views survive a move
  CHECK(file.metadata() == std::map<std::string, std::string>{{"model", "a \"name\""}, {"text", "\u00e9"}});
  CHECK(file.tensors().size() == 5);

  const TensorView& floats = file.view("f");
  CHECK(floats.dtype == DType::f32);
  CHECK(floats.ndim == 3);
  CHECK(floats.shape == std::array<std::int64_t, kMaxDims>{2, 1, 3, 0});
  CHECK(floats.strides == std::array<std::int64_t, kMaxDims>{3, 3, 1, 0});
  CHECK(std::memcmp(floats.data, f, sizeof f) == 0);
  CHECK(file.view("l").dtype == DType::i64);
  CHECK(*static_cast<const std::int64_t*>(file.view("l").data) == l);
  CHECK(file.view("i").dtype == DType::i32);
  CHECK(file.view("i").ndim == 4);
  CHECK(*static_cast<const std::int32_t*>(file.view("i").data) == i);
  CHECK(file.view("m").dtype == DType::boolean);
  CHECK(!static_cast<const bool*>(file.view("m").data)[0]);
  CHECK(static_cast<const bool*>(file.view("m").data)[1]);
  CHECK(file.view("none").shape[1] == 0);

  CHECK_THROWS_AS(file.view("q"), std::runtime_error);
}

TEST_CASE("safetensors: files without tensors", "[safetensors]") {
  CHECK(reason(file_of("{}", 0)).empty());
  CHECK(contains(reason(file_of("{}", 1)), "no tensor claims the bytes after"));
}

TEST_CASE("safetensors: files that are cut short or have no header", "[safetensors]") {
  CHECK_THROWS_AS(SafeTensors::load("/nonexistent/file.safetensors"), std::runtime_error);
  CHECK_THROWS_AS(SafeTensors::load(std::filesystem::temp_directory_path()), std::runtime_error);
  CHECK(contains(reason(""), "too few for a header"));
  CHECK(contains(reason("1234567"), "too few for a header"));
  CHECK(contains(reason(prefix(3) + "{}"), "its header is said to have 3 bytes"));
  CHECK(contains(reason(prefix(~std::uint64_t{0}) + "{}"), "its header is said to have 18446744073709551615 bytes"));
  CHECK(contains(reason(prefix(~std::uint64_t{0} - 7) + "{}"), "its header is said to have"));
  CHECK(contains(reason(prefix(0)), "parse error"));
  CHECK(contains(reason(file_of("{\"t\"", 0)), "parse error"));
  CHECK(contains(reason(file_of("{\"\xff\":1}", 0)), "UTF-8"));
  CHECK(contains(reason(file_of("[]", 0)), "not a JSON object"));
}

TEST_CASE("safetensors: every truncation of a real file is refused", "[safetensors]") {
  const std::string header = R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string whole = file_of(header, 8);
  REQUIRE(reason(whole).empty());
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    CAPTURE(bytes);
    CHECK(!reason(whole.substr(0, bytes)).empty());
  }
}

TEST_CASE("safetensors: descriptions of tensors that are wrong", "[safetensors]") {
  const auto with = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
  };
  const std::string f32 = "\"F32\"";
  REQUIRE(tensor_reason(with(f32, "[2]", "[0,8]"), 8).empty());

  CHECK(contains(tensor_reason("3", 0), "wanted a JSON object"));
  CHECK(contains(tensor_reason("{}", 0), "no \"dtype\""));
  CHECK(contains(tensor_reason(R"({"dtype":"F32"})", 0), "no \"shape\""));
  CHECK(contains(tensor_reason(R"({"dtype":"F32","shape":[1]})", 4), "no \"data_offsets\""));
  CHECK(contains(tensor_reason(with("\"F64\"", "[1]", "[0,8]"), 8), "dtype \"F64\"; wanted F32"));
  CHECK(contains(tensor_reason(with("7", "[1]", "[0,8]"), 8), "dtype 7"));

  CHECK(contains(tensor_reason(with(f32, "[]", "[0,4]"), 4), "shape"));
  CHECK(contains(tensor_reason(with(f32, "[1,1,1,1,1]", "[0,4]"), 4), "shape"));
  CHECK(contains(tensor_reason(with(f32, "2", "[0,8]"), 8), "shape"));
  CHECK(contains(tensor_reason(with(f32, "[-2]", "[0,8]"), 8), "-2 in its shape"));
  CHECK(contains(tensor_reason(with(f32, "[2.0]", "[0,8]"), 8), "2.0 in its shape"));
  CHECK(contains(tensor_reason(with(f32, "[\"2\"]", "[0,8]"), 8), "in its shape"));
  CHECK(contains(tensor_reason(with(f32, "[9223372036854775808]", "[0,0]"), 0), "9223372036854775808 in its shape"));
  CHECK(contains(tensor_reason(with(f32, "[0,9223372036854775808]", "[0,0]"), 0), "in its shape"));
  CHECK(contains(tensor_reason(with(f32, "[2305843009213693952,2]", "[0,0]"), 0), "overflows"));
  CHECK(contains(tensor_reason(with(f32, "[4294967296,1073741824]", "[0,0]"), 0), "overflows"));

  CHECK(contains(tensor_reason(with(f32, "[2]", "[0]"), 8), "data_offsets"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[0,8,8]"), 8), "data_offsets"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[-8,0]"), 8), "-8 in its data_offsets"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[8,0]"), 8), "data_offsets 8, 0"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[0,4]"), 4), "wanted 8 bytes"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[0,8]"), 4), "ends at byte 8 of the data, which has 4"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[0,8]"), 9), "no tensor claims the bytes after"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[4,12]"), 12), "no tensor claims the bytes before"));
  CHECK(contains(tensor_reason(with(f32, "[2]", "[2,10]"), 10), "not aligned"));
}

TEST_CASE("safetensors: tensors that overlap, and names given twice", "[safetensors]") {
  const auto pair = [](const char* second_name, const char* second_offsets) {
    return std::string(R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},")") + second_name +
           R"(":{"dtype":"I32","shape":[2],"data_offsets":)" + second_offsets + "}}";
  };
  CHECK(reason(file_of(pair("b", "[8,16]"), 16)).empty());
  CHECK(contains(reason(file_of(pair("b", "[4,12]"), 12)), "tensor b overlaps"));
  CHECK(contains(reason(file_of(pair("b", "[0,8]"), 8)), "overlaps"));
  CHECK(contains(reason(file_of(pair("a", "[8,16]"), 16)), "no tensor claims"));
}

TEST_CASE("safetensors: booleans other than 0 and 1", "[safetensors]") {
  const std::string header = R"({"m":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})";
  CHECK(reason(prefix(header.size()) + header + std::string("\0\1", 2)).empty());
  CHECK(contains(reason(prefix(header.size()) + header + std::string("\0\2", 2)), "neither 0 nor 1"));
}

TEST_CASE("safetensors: metadata that is not text", "[safetensors]") {
  CHECK(reason(file_of(R"({"__metadata__":{}})", 0)).empty());
  CHECK(contains(reason(file_of(R"({"__metadata__":3})", 0)), "__metadata__ is 3"));
  CHECK(contains(reason(file_of(R"({"__metadata__":{"a":3}})", 0)), "3 for a; wanted a string"));
  CHECK(contains(reason(file_of(R"({"__metadata__":{"a":[]}})", 0)), "wanted a string"));
}

TEST_CASE("safetensors: a header nested very deeply", "[safetensors]") {
  const std::size_t depth = 1'000'000;
  const std::string nested = std::string(depth, '[') + std::string(depth, ']');
  CHECK(!reason(file_of(nested, 0)).empty());
  CHECK(!reason(file_of("{\"t\":" + nested + "}", 0)).empty());
  CHECK(!tensor_reason("{\"dtype\":" + nested + "}", 0).empty());
  CHECK(!tensor_reason("{\"dtype\":\"F32\",\"shape\":[" + nested + "]}", 0).empty());
}

}  // namespace rapt::testing
