// The format: 8 bytes little-endian header length N, N bytes of JSON, then the tensors' bytes without gaps. The JSON
// maps each name to {"dtype", "shape", "data_offsets": [begin, end]} with offsets from the first byte after it.
#include "support/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <utility>

namespace rapt::testing {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensor bytes are used as they are in the file");

constexpr std::uint64_t kPrefixBytes = 8;
constexpr std::uint64_t kMaxSize = std::numeric_limits<std::int64_t>::max();

/// One entry of the header, in the terms of the format.
struct Entry {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin;
  std::uint64_t end;
};

// A reason without the path; load() puts that in front.
[[noreturn]] void fail(const std::string& reason) {
  throw std::runtime_error(reason);
}

/// A value in an error message. Containers only by type: printing one recurses as deep as a hostile file nests it.
std::string shown(const json& value) {
  return value.is_structured() ? value.type_name() : value.dump();
}

const json& member(const json& object, const char* key, const std::string& tensor) {
  const auto found = object.find(key);
  if (found == object.end()) fail("tensor " + tensor + " has no \"" + key + "\"");
  return *found;
}

std::vector<std::uint64_t> read_sizes(const json& object, const char* key, std::size_t least, std::size_t most,
                                      const std::string& tensor) {
  const json& value = member(object, key, tensor);
  if (!value.is_array() || value.size() < least || value.size() > most)
    fail("tensor " + tensor + " has a " + key + " that is not an array of " + std::to_string(least) + " to " +
         std::to_string(most) + " integers");
  std::vector<std::uint64_t> sizes;
  for (const json& size : value) {
    // json keeps integers from 0 to 2^64-1 as unsigned, larger ones as floating point.
    if (!size.is_number_unsigned() || size.get<std::uint64_t>() > kMaxSize)
      fail("tensor " + tensor + " has " + shown(size) + " in its " + key + "; wanted an integer from 0 to 2^63-1");
    sizes.push_back(size.get<std::uint64_t>());
  }
  return sizes;
}

DType read_dtype(const json& object, const std::string& tensor) {
  static const std::map<std::string, DType> kDTypes = {
      {"F32", DType::f32}, {"I32", DType::i32}, {"I64", DType::i64}, {"BOOL", DType::boolean}};
  const json& value = member(object, "dtype", tensor);
  const auto found = value.is_string() ? kDTypes.find(value.get<std::string>()) : kDTypes.end();
  if (found == kDTypes.end())
    fail("tensor " + tensor + " has dtype " + shown(value) + "; wanted F32, I32, I64 or BOOL");
  return found->second;
}

Entry read_entry(const std::string& tensor, const json& object) {
  if (!object.is_object()) fail("tensor " + tensor + " is described by " + shown(object) + "; wanted a JSON object");
  const DType dtype = read_dtype(object, tensor);
  std::uint64_t bytes = size_of(dtype);
  std::vector<std::int64_t> shape;
  for (const std::uint64_t size : read_sizes(object, "shape", 1, kMaxDims, tensor)) {
    if (size != 0 && bytes > kMaxSize / size) fail("tensor " + tensor + " has a shape whose size overflows");
    bytes *= size;
    shape.push_back(static_cast<std::int64_t>(size));
  }
  const std::vector<std::uint64_t> offsets = read_sizes(object, "data_offsets", 2, 2, tensor);
  if (offsets[1] < offsets[0] || offsets[1] - offsets[0] != bytes)
    fail("tensor " + tensor + " has data_offsets " + std::to_string(offsets[0]) + ", " + std::to_string(offsets[1]) +
         "; wanted " + std::to_string(bytes) + " bytes for its shape");
  if (offsets[0] % size_of(dtype) != 0)
    fail("tensor " + tensor + " begins at " + std::to_string(offsets[0]) + ", which is not aligned to its dtype");
  return {dtype, std::move(shape), offsets[0], offsets[1]};
}

std::map<std::string, std::string> read_metadata(const json& object) {
  std::map<std::string, std::string> metadata;
  if (!object.is_object()) fail("__metadata__ is " + shown(object) + "; wanted a JSON object");
  for (const auto& [key, value] : object.items()) {
    if (!value.is_string()) fail("__metadata__ has " + shown(value) + " for " + key + "; wanted a string");
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

/// The format's rule that every data byte belongs to exactly one tensor. It also catches a name given twice: json
/// keeps one of the two, and the other's bytes are then unclaimed.
void check_coverage(const std::map<std::string, Entry>& entries, std::uint64_t data_bytes) {
  std::vector<std::pair<const std::string*, const Entry*>> by_offset;
  for (const auto& [name, entry] : entries) by_offset.emplace_back(&name, &entry);
  std::sort(by_offset.begin(), by_offset.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  std::uint64_t expected = 0;
  for (const auto& [name, entry] : by_offset) {
    if (entry->end > data_bytes)
      fail("tensor " + *name + " ends at byte " + std::to_string(entry->end) + " of the data, which has " +
           std::to_string(data_bytes));
    if (entry->begin < expected) fail("tensor " + *name + " overlaps the one before it");
    if (entry->begin > expected) fail("no tensor claims the bytes before tensor " + *name);
    expected = entry->end;
  }
  if (expected != data_bytes) fail("no tensor claims the bytes after the last tensor");
}

void read_exactly(std::ifstream& file, void* to, std::uint64_t bytes) {
  if (!file.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes))) fail("cannot be read");
}

void check_booleans(const std::string& tensor, std::span<const std::byte> bytes) {
  // Reading a bool object that holds anything else is undefined behaviour.
  const auto bad = std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b > std::byte{1}; });
  if (bad != bytes.end()) fail("tensor " + tensor + " holds a boolean that is neither 0 nor 1");
}

}  // namespace

SafeTensors SafeTensors::load(const std::filesystem::path& path) try {
  std::ifstream file(path, std::ios::binary);
  if (!std::filesystem::is_regular_file(path) || !file) fail("no such file, or not readable");
  const std::uint64_t file_bytes = std::filesystem::file_size(path);
  if (file_bytes < kPrefixBytes) fail("has " + std::to_string(file_bytes) + " bytes, too few for a header");

  std::uint64_t header_bytes = 0;
  read_exactly(file, &header_bytes, kPrefixBytes);
  if (header_bytes > file_bytes - kPrefixBytes)
    fail("its header is said to have " + std::to_string(header_bytes) + " bytes, but the file has " +
         std::to_string(file_bytes));
  std::string header_text(header_bytes, '\0');
  read_exactly(file, header_text.data(), header_bytes);
  const json header = json::parse(header_text);
  if (!header.is_object()) fail("its header is not a JSON object");

  SafeTensors result;
  result.path_ = path;
  std::map<std::string, Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") result.metadata_ = read_metadata(value);
    else entries.emplace(name, read_entry(name, value));
  }
  const std::uint64_t data_bytes = file_bytes - kPrefixBytes - header_bytes;
  check_coverage(entries, data_bytes);

  result.data_.resize(data_bytes);
  read_exactly(file, result.data_.data(), data_bytes);
  for (const auto& [name, entry] : entries) {
    const auto bytes = std::span(result.data_).subspan(entry.begin, entry.end - entry.begin);
    if (entry.dtype == DType::boolean) check_booleans(name, bytes);
    result.tensors_.emplace(name, TensorView(bytes.data(), entry.dtype, Layout(entry.shape)));
  }
  return result;
} catch (const std::exception& error) {
  throw std::runtime_error(path.string() + ": " + error.what());
}

const TensorView& SafeTensors::view(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw std::runtime_error(path_.string() + ": no tensor named " + name);
  return found->second;
}

}  // namespace rapt::testing
