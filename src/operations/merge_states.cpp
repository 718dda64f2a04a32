// merge_states: arguments -> Call, or an Error that names the argument; and its problem's text.
#include "rapt/merge_states.hpp"

#include <string>
#include <vector>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = MergeStatesProblem;

constexpr Field<P> kFields[] = {
    {"dtype", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.dtype != DType::f32) print_word(text, key, to_string(p.dtype));
     },
     [](P& p, const Word& word) { p.dtype = p.out_dtype = word.dtype(); }},
    dtype_field_like<P, &P::out_dtype, &P::dtype>("out"),
    device_field<P>(),
    size_field<P, &P::rows>("rows"),
    size_field<P, &P::dv>("dv"),
    size_field<P, &P::count>("count"),
    flag_field<P, &P::lse>("lse"),
};

class Validator {
 public:
  explicit Validator(const MergeStatesArgs& args) : args_(args) {}

  Call run(std::span<const std::byte> workspace) {
    if (args_.outs.empty()) throw Error("outs", "no tensors", "one or more");
    const Layout& first = args_.outs.front();
    if (first.ndim < 2 || first.ndim > kMaxDims)
      throw Error("outs[0]", std::to_string(first.ndim) + " dimensions", "2 to " + std::to_string(kMaxDims));
    dims_ = static_cast<std::size_t>(first.ndim) - 1;
    const int64_t dv = first.shape[dims_];
    if (dv < 1 || dv > kMaxHeadSize) throw Error("outs[0]", "dv = " + std::to_string(dv), "1 to 8192");
    if (args_.outs.size() != args_.lses.size())
      throw Error("lses", std::to_string(args_.lses.size()) + " tensors",
                  "as many as outs, " + std::to_string(args_.outs.size()));
    const std::size_t count = args_.outs.size();
    const std::shared_ptr<AttentionState[]> states = std::make_shared<AttentionState[]>(count);
    for (std::size_t i = 0; i < count; ++i) {
      const TensorView &out = args_.outs[i], &lse = args_.lses[i];
      take_out("outs[" + std::to_string(i) + "]", out);
      take_lse("lses[" + std::to_string(i) + "]", lse);
      states[i] = {out.data, out.dtype, strides(out), static_cast<const float*>(lse.data), strides(lse)};
    }
    take_out("out", args_.out, true);
    if (args_.lse) take_lse("lse", args_.lse, true);
    check_overlaps(all_);
    check_apart(workspace, all_);

    MergeStatesParams f{};
    f.states = states.get(), f.count = static_cast<int64_t>(count);
    f.out = args_.out.data, f.out_type = args_.out.dtype, f.out_stride = strides(args_.out);
    if (args_.lse) f.lse = static_cast<float*>(args_.lse.data), f.lse_stride = strides(args_.lse);
    f.b = dims_ > 2 ? first.shape[dims_ - 3] : 1, f.h = dims_ > 1 ? first.shape[dims_ - 2] : 1;
    f.s = first.shape[dims_ - 1], f.dv = dv;
    const bool is_empty = all_.front().bytes == 0;
    const Device device = args_.outs.front().device;
    const P problem{
        args_.outs.front().dtype,    args_.out.dtype, device.type, is_empty ? 0 : f.b * f.h * f.s, dv, f.count,
        static_cast<bool>(args_.lse)};
    return {problem, f, device, is_empty, states};
  }

 private:
  void take_out(const std::string& name, const TensorView& t, bool written = false) {
    take(all_, name, t, written, args_.outs.front().device);
    check_float(name, t.dtype);
    const Layout& first = args_.outs.front();
    if (!same_shape(t, first)) throw Error(name, "shape " + shape_text(t), "that of outs[0], " + shape_text(first));
  }
  void take_lse(const std::string& name, const TensorView& t, bool written = false) {
    take(all_, name, t, written, args_.outs.front().device);
    check_f32(name, t.dtype);
    Layout wanted = args_.outs.front();
    --wanted.ndim;
    if (!same_shape(t, wanted))
      throw Error(name, "shape " + shape_text(t), shape_text(wanted) + ", that of outs[0] without its last dimension");
  }
  // Of the rows' dimensions, right-aligned at s, and of the elements of a row. Those of one element are not stepped
  // along, and their strides may be any number.
  Strides strides(const Layout& t) const {
    const auto step = [&](std::size_t from_last) {
      return from_last > dims_ || t.shape[dims_ - from_last] <= 1 ? 0 : t.strides[dims_ - from_last];
    };
    const bool has_elements = t.ndim == static_cast<int>(dims_) + 1;
    return {step(3), step(2), step(1), has_elements && t.shape[dims_] > 1 ? t.strides[dims_] : 1};
  }

  const MergeStatesArgs& args_;
  std::vector<Checked> all_;
  std::size_t dims_ = 0;  // of a row's position
};

}  // namespace

std::string MergeStatesProblem::to_string() const {
  return print_fields("merge_states", *this, kFields);
}

MergeStatesProblem MergeStatesProblem::parse(std::string_view text) {
  MergeStatesProblem p;
  Words(text, "merge_states").read(p, kFields);
  return p;
}

MergeStatesProblem MergeStatesProblem::of(const MergeStatesArgs& args) {
  return std::get<MergeStatesProblem>(validate(args).problem);
}

void check(const MergeStatesProblem& p) {
  for (const DType dtype : {p.dtype, p.out_dtype}) check_float("outs", dtype);
  if (p.rows < 0 || p.rows > kMaxOffset) throw Error("outs", std::to_string(p.rows) + " rows", "0 to 2^52");
  if (p.dv < 1 || p.dv > kMaxHeadSize) throw Error("outs", "dv = " + std::to_string(p.dv), "1 to 8192");
  if (p.count < 1 || p.count > kMaxSize) throw Error("outs", std::to_string(p.count) + " tensors", "one or more");
}

Call validate(const MergeStatesArgs& args, std::span<const std::byte> workspace) {
  return Validator(args).run(workspace);
}

}  // namespace rapt
