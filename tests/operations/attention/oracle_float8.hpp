// The bounds of entries that multiply codes of f8e4m3, as Reference describes them.
#pragma once

#include <cstdint>
#include <functional>

#include "operations/attention/oracle.hpp"
#include "operations/attention/oracle_rows.hpp"

namespace rapt::testing::attention_rows {

/// Whether an entry may multiply codes of f8e4m3.
bool multiplies_codes(const AttentionArgs& args);

/// Adds them for rows from `first` on, beside those of fp32, which `result` has. Takes `rows` apart. `flat`: where the
/// results of a row are.
void bound_codes(const Head& head, const Operands& operands, const Matrix& q, std::int64_t first, Rows& rows,
                 Reference& result, const std::function<std::int64_t(std::int64_t)>& flat);

}  // namespace rapt::testing::attention_rows
