// What plans of CPU entries go by, measured on one machine: it changes how fast calls are, and no bit of a result.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rapt/export.h"

namespace rapt {

/// What the plans of one entry go by. -1: the entry does not use the value.
struct TuningValues {
  /// Microseconds of work, as estimated from FLOPs and bytes, that are worth another worker.
  std::int64_t worker_us = -1;
  /// Work items that each of several workers gets at least, if there are so many. Where all items are alike: into how
  /// many parts a worker's share is cut, fetched one by one.
  std::int64_t items_per_worker = -1;
  /// attention: the fewest rows of an item, unless a worker would then get fewer than two items.
  std::int64_t min_item_rows = -1;
  /// The share of L2 that an item's rows (attention), or its keys (attention_backward), may take.
  std::int64_t l2_percent = -1;
  /// index_scores: the fewest keys of an item that has not all of them.
  std::int64_t split_keys = -1;
  /// Of operations whose entries all give the same bits: 1 for an entry that goes before the others.
  std::int64_t first = -1;

  friend bool operator==(const TuningValues&, const TuningValues&) = default;
};

struct EntryTuning {
  std::string entry;
  TuningValues values;

  friend bool operator==(const EntryTuning&, const EntryTuning&) = default;
};

/// The values of some entries; of the others plans go by the defaults, which entries() has.
struct Tuning {
  std::vector<EntryTuning> entries;
  std::string source;  ///< the file that it was read from; else empty
};

/// A member of TuningValues as files name it, and what it may be.
struct TuningKey {
  std::string_view name;
  std::int64_t TuningValues::*value;
  std::int64_t min, max;
};
RAPT_API std::span<const TuningKey> tuning_keys();

/// Reads what `rapt tune` wrote. Throws Error, which names file and line, for what cannot be read, is no regular file
/// or not as it should be (every entry has all its values), and for a file of another machine or version of rapt.
RAPT_API Tuning read_tuning(const std::string& path);
/// The text of such a file, for this machine and version, with all values of its entries. Throws Error as Context does.
RAPT_API std::string to_string(const Tuning& tuning);

}  // namespace rapt
