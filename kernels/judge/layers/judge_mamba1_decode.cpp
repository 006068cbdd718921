// The cases of mamba1_decode, its definition, and common mistakes of implementations.
#include <fmt/format.h>

#include "kernels/judge/layers/mamba1_host.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/recurrent/mamba1_decode.hpp"

namespace lockstep::judging::of_mamba1_decode {
namespace {

constexpr std::string_view kName = "mamba1_decode";
constexpr std::int64_t kColumns = 16;  ///< N of every Mamba1 model, and of kernels

// --- Cases ---------------------------------------------------------------------------------------

struct CaseSpec {
  std::string name;
  std::int64_t D = 0;  ///< channels
  Batch batch{};
  std::int64_t R = 0;  ///< width of dt_low; 0: no norms
  bool weighted = false;
  bool skip = true, z = true, dt_bias = true, softplus = true;
  bool timed = false;
};

/// Adds dt_low and the weights of the norms. eps is so large that it changes a result.
void add_norms(Case& c, Draw& draw, const CaseSpec& w, std::int64_t T, ElementType type) {
  if (w.R == 0) return;
  c.scalars.push_back({"norm_eps", 0.25});
  c.tensors.push_back(draw("dt_low", type, {T, w.R}, {"token", "column"}));
  poison_padding(c.tensors.back(), c);
  if (!w.weighted) return;
  c.tensors.push_back(draw("b_weight", type, {kColumns}));
  c.tensors.push_back(draw("c_weight", type, {kColumns}));
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  Batch batch = w.batch;
  batch.seed = options.seed;
  if (w.timed) batch.lengths.assign(static_cast<std::size_t>(options.batch), 1);
  const std::int64_t T = batch.tokens(), slots = batch.slot_count();
  const ElementType type = options.activations;
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 163 + T * 5 + w.D)));
  Case c{.name = w.name, .timed = w.timed};
  c.tensors.push_back(
      draw("state", options.states, {slots, w.D, kColumns}, {"slot", "channel", "column"}));
  c.tensors.back().role = Role::state;
  c.tensors.push_back(draw("x", type, {T, w.D}, {"token", "channel"}));
  c.tensors.push_back(draw("dt", type, {T, w.D}, {"token", "channel"}));
  if (!w.softplus)
    for (double& d : c.tensors.back().values) d = std::abs(d);
  c.tensors.push_back(draw("A", ElementType::float32, {w.D, kColumns}));
  for (double& a : c.tensors.back().values) a = -1.0 / 64 - std::abs(a);
  for (const char* const name : {"B", "C"})
    c.tensors.push_back(draw(name, type, {T, kColumns}, {"token", "column"}));
  batch.describe(c);
  for (const std::size_t i : {1, 2, 4, 5}) poison_padding(c.tensors[i], c);
  poison_unread(c.tensors[0], c);
  if (w.skip) c.tensors.push_back(draw("D", ElementType::float32, {w.D}));
  if (w.z) {
    c.tensors.push_back(draw("z", type, {T, w.D}, {"token", "channel"}));
    poison_padding(c.tensors.back(), c);
  }
  if (w.dt_bias) c.tensors.push_back(draw("dt_bias", ElementType::float32, {w.D}));
  if (w.softplus) c.scalars.push_back({"dt_softplus", true});
  add_norms(c, draw, w, T, type);
  c.tensors.push_back(Draw::output("out", type, {T, w.D}, {"token", "channel"}));
  c.bytes = 2 * c.tensors[0].bytes() / std::max<std::int64_t>(slots, 1) * batch.rows();
  for (const std::string_view name : {"x", "dt", "A", "out"}) c.bytes += c.tensor(name).bytes();
  c.about = fmt::format("{}, D={} N={}{}", counted(batch.rows(), "row"), w.D, kColumns,
                        w.R > 0 ? ", norms" : "");
  return c;
}

std::vector<CaseSpec> decodes() {
  const std::vector<std::int64_t> nine(9, 1), four(4, 1);
  return {
      {.name = "decode", .D = 64, .batch = {.lengths = nine, .padding_rows = {2}}},
      {.name = "decode-norms", .D = 64, .batch = {.lengths = nine, .padding_rows = {0}}, .R = 24},
      {.name = "decode-weighted-norms",
       .D = 63,
       .batch = {.lengths = four},
       .R = 256,
       .weighted = true},
      {.name = "decode-bare",
       .D = 65,
       .batch = {.lengths = four, .padding_rows = {3}},
       .skip = false,
       .z = false,
       .dt_bias = false,
       .softplus = false},
      {.name = "decode-apart", .D = 32, .batch = {.lengths = four, .apart = true}},
      {.name = "decode-in-order", .D = 32, .batch = {.lengths = four, .in_order = true}},
      {.name = "decode-ones", .D = 1, .batch = {.lengths = {1}}, .R = 1},
      {.name = "decode-many-rows", .D = 8, .batch = one_token_rows(130)},
      {.name = "decode-high-slots",
       .D = 4,
       .batch = {.lengths = {1, 1, 1}, .padding_rows = {1}, .first_slot = 33000}},
      {.name = "decode-pad-slot-0",
       .D = 64,
       .batch = {.lengths = nine, .padding_rows = {1, 8}, .pad_slot_id = 0}},
  };
}

const CaseSpec kServed{.name = "serving", .D = 8192, .timed = true};

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-softplus", "without the softplus of dt"},
    {"always-softplus", "with a softplus of dt that was not asked for"},
    {"no-dt-bias", "without dt_bias"},
    {"no-D", "without D x"},
    {"no-z", "without the gate z"},
    {"z-no-silu", "with z as it came, without its silu"},
    {"no-decay", "without the decay"},
    {"log-A", "with -exp(A) for A (A taken for A_log)"},
    {"grow", "with A's sign turned around"},
    {"swapped-BC", "with B and C swapped"},
    {"no-norms", "without the norms of dt, B and C"},
    {"no-dt-norm", "without the norm of dt"},
    {"bias-normed", "with dt_bias divided by the root mean square too"},
    {"no-eps", "without the eps of the norms"},
    {"no-weights", "without the weights of the norms"},
    {"swapped-weights", "with the weights of B's and C's norms swapped"},
    {"row-slots", "with row i on slot i, without state_indices"},
    {"from-zero", "with every row started from a zero state"},
};

template <class S>
struct Host : Mamba1Host<S> {
  using Base = Mamba1Host<S>;
  using Base::x, Base::dt, Base::bias, Base::rows;

  Host(const Case& c, std::string_view mistake)
      : Base(c, mistake),
        low(maybe_array_of<S, 2>(c, "dt_low")),
        b_weight(maybe_array_of<S, 1>(c, "b_weight")),
        c_weight(maybe_array_of<S, 1>(c, "c_weight")) {
    if (const auto eps = c.number("norm_eps")) norm_eps = static_cast<S>(*eps);
    change_norms(mistake);
    if (mistake == "from-zero") start_from_zero(this->state);
  }

  void change_norms(std::string_view mistake) {
    if (!norm_eps) return;
    require(low.has_value(), "norm_eps comes with dt_low");
    for (std::int64_t t = 0; t < x.extent(0); ++t) {
      const Vector<S> row = as_vector(at(std::as_const(*low).view(), t));
      const S factor = reference::mamba1_detail::reciprocal_rms<S>(row, *norm_eps);
      for (std::int64_t i = 0; i < x.extent(1); ++i) {
        if (mistake == "no-dt-norm") dt(t, i) /= factor;
        if (mistake == "bias-normed" && bias) dt(t, i) += (*bias)(i) - (*bias)(i) / factor;
      }
    }
    if (mistake == "no-eps") norm_eps = S{0};
    if (mistake == "no-norms") norm_eps.reset();
    if (mistake == "swapped-weights") std::swap(b_weight, c_weight);
    if (mistake == "no-weights" || mistake == "no-norms") b_weight.reset(), c_weight.reset();
  }

  reference::Mamba1Decode<S> inputs() const {
    auto in = Base::template inputs_of<reference::Mamba1Decode<S>>();
    if (low) in.dt_low = low->view();
    if (b_weight) in.b_weight = b_weight->view();
    if (c_weight) in.c_weight = c_weight->view();
    in.norm_eps = norm_eps;
    in.slots = rows.slots();
    return in;
  }

  std::optional<Array<S, 2>> low;
  std::optional<Array<S, 1>> b_weight, c_weight;
  std::optional<S> norm_eps;
};

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounded_stores) {
  Host<S> host(c, mistake);
  Array<S, 2> out(host.x.shape(), S{0});
  reference::Mamba1Decode<S> in = host.inputs();
  in.storage = storage_of(c, "state", rounded_stores);
  if (mistake == "z-no-silu") in.z.reset();
  reference::mamba1_decode<S>(in, host.state.view(), out.view());
  if (mistake == "z-no-silu" && host.z)
    for (std::int64_t t = 0; t < out.extent(0); ++t)
      for (std::int64_t i = 0; i < out.extent(1); ++i)
        if (out(t, i) != 0) out(t, i) = rounded(out(t, i) * (*host.z)(t, i), in.storage.output);
  return {{"out", as_values(out)}, {"state", as_values(host.state)}};
}

const JudgedKernel kOperation{
    .name = kName,
    .summary = "a step of a Mamba1 layer between its projections: 14 cases, 18 known mistakes",
    .positional = {"state", "x", "dt", "A", "B", "C"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(
              planned<CaseSpec>({decodes(), listed_and_in_order(kServed)}, make),
              planned<CaseSpec>(
                  {{{.name = "rows-65537", .D = 8, .batch = one_token_rows(kWideRows)}}}, make),
              "decode");
        },
    .row_elements = kServed.D * kColumns,
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_mamba1_decode
