#include "support/buffer.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

namespace rapt::testing {
namespace {

constexpr std::align_val_t kAlignment{64};

std::size_t page_size() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Buffer::Buffer(std::size_t bytes, Placement placement) : size_(bytes), placement_(placement) {
  if (placement == Placement::heap) {
    data_ = static_cast<std::byte*>(operator new(bytes, kAlignment));
    return;
  }
  const std::size_t page = page_size();
  const std::size_t inner = (bytes + page - 1) / page * page;
  mapping_size_ = inner + 2 * page;
  void* mapping = mmap(nullptr, mapping_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  if (inner != 0 && mprotect(mapping_ + page, inner, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, mapping_size_);
    throw std::bad_alloc();
  }
  data_ = mapping_ + page + (placement == Placement::back ? inner - bytes : 0);
}

Buffer::Buffer(const Buffer& other) : Buffer(other.size_, other.placement_) {
  std::copy_n(other.data_, size_, data_);
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(placement_, other.placement_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_size_, other.mapping_size_);
}

Buffer::~Buffer() {
  if (mapping_) munmap(mapping_, mapping_size_);
  else if (data_) operator delete(data_, kAlignment);
}

void Buffer::protect() {
  const std::size_t page = page_size();
  if (mapping_size_ > 2 * page) mprotect(mapping_ + page, mapping_size_ - 2 * page, PROT_READ);
}

}  // namespace rapt::testing
