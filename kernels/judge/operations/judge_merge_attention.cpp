// The cases of merge_attention, its definition and mistakes: the attention over two sets of keys
// made of the attention over each.
#include <fmt/format.h>

#include "kernels/judge/operation.hpp"
#include "reference/attention/softmax_attention.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::judging::of_merge_attention {
namespace {

constexpr std::string_view kName = "merge_attention";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// --- Cases ---------------------------------------------------------------------------------------

/// The places of the two parts in memory: by themselves, as a part of wider rows, with the heads of
/// a token or the tokens of a head far apart, lse with tokens first.
enum class Layout : std::uint8_t { plain, wide_rows, heads_first, lse_by_token };

struct CaseSpec {
  std::string name;
  std::int64_t T, heads = 4, columns = 128;
  double lse = 1;      ///< its size
  bool empty = false;  ///< of some tokens one side has no key, or neither
  Layout layout = Layout::plain;
  bool timed = false;
};

/// -inf and +inf in turns where a side is empty, whose output is then NaN.
void make_empty(Tensor& out, Tensor& lse, std::int64_t side) {
  const std::int64_t T = out.extents[0], heads = out.extents[1], columns = out.extents[2];
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t kind = (t * heads + h) % 5;  // a, b, both, neither, neither
      if (kind != 2 && kind != side) continue;
      lse.values[static_cast<std::size_t>(h * T + t)] = t % 2 == 0 ? -kInfinity : kInfinity;
      std::fill_n(out.values.begin() + (t * heads + h) * columns, columns,
                  std::numeric_limits<double>::quiet_NaN());
    }
}

void lay_out(Layout layout, Tensor& out, Tensor& lse) {
  const std::int64_t T = out.extents[0], heads = out.extents[1], columns = out.extents[2];
  if (layout == Layout::wide_rows) spread(out, 1, 64), spread(lse, 0, 8);
  if (layout == Layout::heads_first) out.strides = {columns, T * columns, 1};
  if (layout == Layout::lse_by_token) lse.strides = {1, heads};
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  constexpr std::int64_t kServedTokens = 16;
  const std::int64_t T = w.timed ? options.batch * kServedTokens : w.T;
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 71 + T + w.heads)));
  Case c{.name = w.name, .timed = w.timed};
  for (const std::string side : {"a", "b"}) {
    Tensor out = draw("out_" + side, options.activations, {T, w.heads, w.columns},
                      {"token", "head", "column"});
    Tensor lse = draw("lse_" + side, ElementType::float32, {w.heads, T}, {"head", "token"});
    for (double& x : lse.values) x *= w.lse;
    if (w.empty) make_empty(out, lse, side == "a" ? 0 : 1);
    lay_out(w.layout, out, lse);
    c.tensors.push_back(std::move(out));
    c.tensors.push_back(std::move(lse));
  }
  c.tensors.push_back(Draw::output("out", options.activations, {T, w.heads, w.columns},
                                   {"token", "head", "column"}));
  c.tensors.push_back(Draw::output("lse", ElementType::float32, {w.heads, T}, {"head", "token"}));
  for (const Tensor& one : c.tensors) c.bytes += one.bytes();
  c.about =
      fmt::format("{}, {}, {} wide", counted(T, "token"), counted(w.heads, "head"), w.columns);
  return c;
}

std::vector<CaseSpec> parts() {
  return {
      {.name = "some-tokens", .T = 37},
      {.name = "one-token", .T = 1},
      {.name = "one-head", .T = 65, .heads = 1},
      {.name = "all-heads", .T = 5, .heads = 128},
      {.name = "wide", .T = 9, .columns = 512},
      {.name = "narrow", .T = 9, .heads = 3, .columns = 8},
      {.name = "odd-sizes", .T = 13, .heads = 3, .columns = 63},
      {.name = "far-apart", .T = 33, .lse = 30},
      {.name = "large-lse", .T = 33, .lse = 400},
      {.name = "empty-sides", .T = 23, .empty = true},
      {.name = "empty-sides-by-token", .T = 23, .empty = true, .layout = Layout::lse_by_token},
      {.name = "wide-rows", .T = 19, .layout = Layout::wide_rows},
      {.name = "heads-first", .T = 19, .layout = Layout::heads_first},
      {.name = "lse-by-token", .T = 19, .layout = Layout::lse_by_token},
  };
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537", .T = kWideRows, .heads = 1, .columns = 8}};
}

const CaseSpec kServed{.name = "serving", .T = 0, .heads = 128, .columns = 512, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"mean", "with the mean of both sides, without their lse"},
    {"swapped", "with each side weighted by the other's lse"},
    {"first-alone", "with the first side alone"},
    {"second-alone", "with the second side alone"},
    {"larger-alone", "with the side of the larger lse alone"},
    {"unnormalised", "with weights whose sum is not 1: exp(lse - largest) alone"},
    {"powers-of-two", "with lse taken for powers of two"},
    {"lse-of-2", "with the merged lse in powers of two"},
    {"lse-largest", "with the larger lse for the merged one"},
    {"lse-added", "with the sum of both lse for the merged one"},
    {"plus-is-a-weight", "with an lse of +inf taken for a weight instead of no key"},
    {"empty-counts", "with an empty side's lse taken for 0"},
    {"empty-plus", "with an lse of +inf where both sides are empty"},
    {"first-head", "with every head on the lse of head 0"},
    {"turned-lse", "with lse taken for [T, heads]"},
};

template <class S>
class Definition {
 public:
  Definition(const Case& c, std::string_view mistake, bool rounded)
      : mistake_(mistake),
        format_(rounded ? format_of(c.tensor("out").type) : Format::exact),
        out_{array_of<S, 3>(c, "out_a"), array_of<S, 3>(c, "out_b")},
        lse_{array_of<S, 2>(c, "lse_a"), array_of<S, 2>(c, "lse_b")} {}

  Answer answer() const {
    const auto [T, heads, columns] = out_[0].shape();
    Array<S, 3> out(out_[0].shape());
    Array<S, 2> lse(lse_[0].shape());
    if (mistake_.empty())
      reference::merge_attention<S>(out_[0].view(), lse_[0].view(), out_[1].view(), lse_[1].view(),
                                    out.view(), lse.view());
    for (std::int64_t t = 0; t < T && !mistake_.empty(); ++t)
      for (std::int64_t h = 0; h < heads; ++h) {
        const reference::Attended<S> both = merged(side(0, t, h), side(1, t, h));
        mapped(at(out.view(), t, h)) = both.out;
        lse(h, t) = both.lse;
      }
    for (S& x : out) x = rounded(x, format_);
    return {{"out", as_values(out)}, {"lse", as_values(lse)}};
  }

 private:
  reference::Attended<S> side(int which, std::int64_t t, std::int64_t h) const {
    const Array<S, 2>& all = lse_[which];
    S lse = all(mistake_ == "first-head" ? 0 : h, t);
    if (mistake_ == "turned-lse") lse = all.data()[t * all.extent(0) + h];
    if (mistake_ == "powers-of-two") lse *= std::log(S{2});
    reference::Attended<S> one{as_vector(at(out_[which].view(), t, h)), lse};
    if (mistake_ == "empty-counts" && std::isinf(lse))
      one = {Vector<S>::Zero(one.out.size()), S{0}};
    return one;
  }

  reference::Attended<S> merged(const reference::Attended<S>& a,
                                const reference::Attended<S>& b) const {
    reference::Attended<S> both = reference::merged<S>(a, b);
    if (mistake_ == "first-alone") return a;
    if (mistake_ == "second-alone") return b;
    if (mistake_ == "lse-of-2") both.lse /= std::log(S{2});
    if (mistake_ == "powers-of-two") both.lse /= std::log(S{2});
    if (mistake_ == "empty-plus" && std::isinf(both.lse)) both.lse = std::abs(both.lse);
    if (mistake_ == "plus-is-a-weight" &&
        std::max(a.lse, b.lse) == std::numeric_limits<S>::infinity())
      both = {both.out * std::numeric_limits<S>::quiet_NaN(), std::numeric_limits<S>::quiet_NaN()};
    if (std::isinf(a.lse) || std::isinf(b.lse)) return both;
    const S largest = std::max(a.lse, b.lse);
    const S weight_a = std::exp(a.lse - largest), weight_b = std::exp(b.lse - largest);
    if (mistake_ == "mean") both.out = (a.out + b.out) / 2;
    if (mistake_ == "swapped")
      both.out = (weight_b * a.out + weight_a * b.out) / (weight_a + weight_b);
    if (mistake_ == "larger-alone") both.out = a.lse >= b.lse ? a.out : b.out;
    if (mistake_ == "unnormalised") both.out = weight_a * a.out + weight_b * b.out;
    if (mistake_ == "lse-largest") both.lse = largest;
    if (mistake_ == "lse-added") both.lse = a.lse + b.lse;
    return both;
  }

  std::string_view mistake_;
  Format format_;
  Array<S, 3> out_[2];
  Array<S, 2> lse_[2];
};

const JudgedKernel kOperation{
    .name = kName,
    .summary =
        "attention over two sets of keys, of the attention over each: 15 cases, 15 known "
        "mistakes",
    .positional = {"out_a", "lse_a", "out_b", "lse_b"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({parts(), {kServed}}, make),
                            planned<CaseSpec>({wide_rows()}, make));
        },
    .row_elements = std::int64_t{3} * 16 * 128 * 512,
    .truth = [](const Case& c,
                std::string_view m) { return Definition<double>(c, m, false).answer(); },
    .yardstick = [](const Case& c,
                    std::string_view m) { return Definition<float>(c, m, true).answer(); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_merge_attention
