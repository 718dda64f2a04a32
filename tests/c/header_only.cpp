// rapt.h is complete on its own and valid C++11.
#include "rapt/rapt.h"

static_assert(noexcept(rapt_attention(nullptr, nullptr)), "no exception crosses the border");

int main() {
  rapt_attention_args args = rapt_attention_args_init();
  rapt_context_options options = rapt_context_options_init();
  rapt_append_kv_args append = rapt_append_kv_args_init();
  const bool sizes = args.struct_size == sizeof args && options.struct_size == sizeof options;
  return sizes && append.struct_size == sizeof append ? 0 : 1;
}
