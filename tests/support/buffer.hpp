// Memory for tests, on the heap or between guard pages.
#pragma once

#include <cstddef>

namespace rapt::testing {

/// `heap`: exactly as many bytes as asked for, 64-byte aligned. `front`, `back`: pages of its own with an inaccessible
/// page before and after; the data begins right behind the first (front) or ends right before the second (back), so
/// that one element too far in that direction faults.
enum class Placement { heap, front, back };

class Buffer {
 public:
  Buffer() = default;
  /// Throws std::bad_alloc.
  explicit Buffer(std::size_t bytes, Placement placement = Placement::heap);
  Buffer(const Buffer& other);  ///< placed alike, not protected
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  /// Makes writes fault (guarded placements; nothing on the heap). Pages stay readable.
  void protect();

 private:
  void swap(Buffer& other) noexcept;

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  Placement placement_ = Placement::heap;
  std::byte* mapping_ = nullptr;
  std::size_t mapping_size_ = 0;
};

}  // namespace rapt::testing
