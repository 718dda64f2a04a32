#include "core/dtypes.hpp"

#include <vector>

#include "core/text.hpp"

namespace rapt {

std::string types_text(DTypeSet types) {
  std::vector<std::string_view> names;
  for (const DType dtype : kDTypes)
    if (types & set_of(dtype)) names.push_back(to_string(dtype));
  return list_text(names, " or ");
}

void refuse_type(std::string_view name, DType dtype, DTypeSet types, const char* wanted) {
  throw Error(std::string(name), "dtype " + std::string(to_string(dtype)), wanted ? wanted : types_text(types));
}

}  // namespace rapt
