// The cases of batched_product, its definition and mistakes. Not timed: its least time may be one
// of products, whose rate the judge does not measure.
#include <fmt/format.h>

#include <cmath>

#include "kernels/judge/operation.hpp"
#include "reference/base/counted.hpp"
#include "reference/base/mix.hpp"
#include "reference/layers/batched_product.hpp"

namespace lockstep::judging::of_batched_product {
namespace {

constexpr std::string_view kName = "batched_product";
constexpr std::int64_t kGroup = reference::kScaleGroup;

// --- Cases ---------------------------------------------------------------------------------------

/// In e4m3 with a scale for each 128 numbers of a row and each 128 x 128 of a weight, or with one
/// for a tensor.
enum class Numbers : std::uint8_t { plain, blocks, whole };

struct CaseSpec {
  std::string name;
  std::int64_t G, M, N, K;
  Numbers numbers = Numbers::plain;
  bool shared = false;  ///< x has the same rows for every g
  bool holes = false;   ///< between rows of x and of the weight
  bool timed = false;
};

std::int64_t blocks_of(std::int64_t extent) {
  return (extent + kGroup - 1) / kGroup;
}

Tensor numbers_of(Tensor tensor, Numbers numbers) {
  if (numbers == Numbers::plain) return tensor;
  tensor.type = ElementType::e4m3;
  for (double& x : tensor.values) x = rounded(16 * x, Format::e4m3);
  return tensor;
}

Tensor scale_of(Draw& draw, const std::string& name, const Extents& extents,
                const std::vector<std::string>& axes) {
  Tensor scale = draw(name, ElementType::float32, extents, axes);
  for (double& x : scale.values) x = (1 + 15 * std::abs(x)) / 128;
  return scale;
}

Case make(const CaseSpec& w, const CaseOptions& options) {
  Draw draw(mix64(options.seed ^ static_cast<std::uint64_t>(w.name.size() * 73 + w.M + w.K)));
  Case c{.name = w.name, .timed = w.timed};
  const std::int64_t of_x = w.shared ? 1 : w.G;
  c.tensors.push_back(numbers_of(
      draw("x", options.activations, {of_x, w.M, w.K}, {"group", "token", "column"}), w.numbers));
  c.tensors.push_back(numbers_of(
      draw("weight", options.activations, {w.G, w.N, w.K}, {"group", "column", "in"}), w.numbers));
  // Sizes far apart: numbers on a grid alone have exact sums, whatever their order.
  if (w.numbers == Numbers::plain)
    for (std::size_t i = 0; i < c.tensors[0].values.size(); ++i)
      c.tensors[0].values[i] = std::ldexp(c.tensors[0].values[i], -4 * static_cast<int>(i % 5));
  if (w.holes)
    for (Tensor& one : c.tensors) spread(one, 1, 64);
  if (w.numbers == Numbers::blocks) {
    c.tensors.push_back(
        scale_of(draw, "x_scale", {of_x, w.M, blocks_of(w.K)}, {"group", "token", "block"}));
    c.tensors.push_back(scale_of(draw, "weight_scale", {w.G, blocks_of(w.N), blocks_of(w.K)},
                                 {"group", "block", "block"}));
  }
  if (w.numbers == Numbers::whole)
    for (const std::string name : {"x_scale", "weight_scale"})
      c.tensors.push_back(scale_of(draw, name, {1, 1, 1}, {"group", "block", "block"}));
  const ElementType type = w.numbers == Numbers::plain ? options.activations : ElementType::bf16;
  c.tensors.push_back(Draw::output("out", type, {w.G, w.M, w.N}, {"group", "token", "column"}));
  c.about = fmt::format("{}, {} by [{}, {}]{}", counted(w.G, "group"), counted(w.M, "row"), w.N,
                        w.K, w.shared ? ", x shared" : "");
  return c;
}

std::vector<CaseSpec> products() {
  return {
      {.name = "some-rows", .G = 3, .M = 21, .N = 64, .K = 128},
      {.name = "one-row", .G = 2, .M = 1, .N = 128, .K = 512},
      {.name = "around-tiles", .G = 2, .M = 65, .N = 72, .K = 200},
      {.name = "many-rows", .G = 1, .M = 130, .N = 16, .K = 64},
      {.name = "long-rows", .G = 1, .M = 5, .N = 24, .K = 2048},
      {.name = "shared", .G = 4, .M = 9, .N = 32, .K = 96, .shared = true},
      {.name = "holes", .G = 2, .M = 17, .N = 40, .K = 144, .holes = true},
      {.name = "blocks", .G = 2, .M = 19, .N = 200, .K = 384, .numbers = Numbers::blocks},
      {.name = "blocks-shared",
       .G = 2,
       .M = 33,
       .N = 64,
       .K = 256,
       .numbers = Numbers::blocks,
       .shared = true},
      {.name = "whole", .G = 2, .M = 12, .N = 136, .K = 272, .numbers = Numbers::whole},
  };
}

std::vector<CaseSpec> wide_rows() {
  return {{.name = "rows-65537", .G = 1, .M = kWideRows, .N = 8, .K = 16}};
}

// --- The definition, and definitions with a mistake ----------------------------------------------

const std::vector<Mistake> kMistakes{
    {"no-x-scale", "without x_scale"},
    {"no-weight-scale", "without weight_scale"},
    {"first-x-scale", "with the first scale of each row for all its numbers"},
    {"first-weight-scale", "with the weight's first scale for all its numbers"},
    {"scale-twice", "with x_scale applied twice"},
    {"turned-scale", "with weight_scale's blocks of rows and columns changing places"},
    {"first-group", "with every group on the weight of the first"},
    {"next-group", "with every group on the weight of the next"},
    {"turned-weight", "with the weight taken for [G, K, N]"},
    {"no-tail", "without the numbers after the last multiple of 128 of a row"},
    {"first-block", "with the first 128 numbers of a row alone"},
};

template <class S>
Answer compute(const Case& c, std::string_view mistake, bool rounding) {
  Array<S, 3> x = array_of<S, 3>(c, "x"), weight = array_of<S, 3>(c, "weight");
  auto x_scale = maybe_array_of<S, 3>(c, "x_scale");
  auto weight_scale = maybe_array_of<S, 3>(c, "weight_scale");
  const auto [G, N, K] = weight.shape();
  if (mistake == "no-x-scale") x_scale.reset();
  if (mistake == "no-weight-scale") weight_scale.reset();
  const auto only_first = [](Array<S, 3>& scale) {
    const Array<S, 3> all = scale;
    for_each_element(scale.view(), [&](const auto& i, S& e) { e = all(i[0], i[1], 0); });
  };
  if (mistake == "first-x-scale" && x_scale) only_first(*x_scale);
  if (mistake == "first-weight-scale" && weight_scale)
    fill(weight_scale->view(), (*weight_scale)(0, 0, 0));
  if (mistake == "scale-twice" && x_scale)
    for (S& e : *x_scale) e *= e;
  if (mistake == "turned-scale" && weight_scale) {
    const Array<S, 3> all = *weight_scale;
    const std::int64_t rows = all.extent(1), columns = all.extent(2);
    for_each_element(weight_scale->view(), [&](const auto& i, S& e) {
      e = all(i[0], std::min(i[2], rows - 1), std::min(i[1], columns - 1));
    });
  }
  const Array<S, 3> given = weight;
  if (mistake == "first-group" || mistake == "next-group")
    for_each_element(weight.view(), [&, groups = G](const auto& i, S& e) {
      e = given(mistake == "first-group" ? 0 : (i[0] + 1) % groups, i[1], i[2]);
    });
  if (mistake == "turned-weight")
    for_each_element(weight.view(), [&, columns = N, rows = K](const auto& i, S& e) {
      e = given.data()[i[0] * columns * rows + i[2] * columns + i[1]];
    });
  if (mistake == "no-tail" || mistake == "first-block")
    for_each_element(x.view(), [&, rows = K](const auto& i, S& e) {
      if (i[2] >= (mistake == "no-tail" ? rows / kGroup * kGroup : kGroup)) e = 0;
    });
  Array<S, 3> out(Shape<3>{G, x.extent(1), N});
  reference::BatchedProduct<S> in{.x = std::as_const(x).view(),
                                  .weight = std::as_const(weight).view()};
  if (x_scale) in.x_scale = std::as_const(*x_scale).view();
  if (weight_scale) in.weight_scale = std::as_const(*weight_scale).view();
  reference::batched_product<S>(in, out.view());
  if (rounding)
    for (S& e : out) e = rounded(e, format_of(c.tensor("out").type));
  return {{"out", as_values(out)}};
}

const JudgedKernel kOperation{
    .name = kName,
    .summary =
        "products of rows with the weights of their groups, also of numbers in e4m3 with "
        "scales: 10 cases, 11 known mistakes",
    .positional = {"x", "weight"},
    .default_types = "bfloat16/float32",
    .plans =
        [] {
          return with_large(planned<CaseSpec>({products()}, make),
                            planned<CaseSpec>({wide_rows()}, make));
        },
    .truth = [](const Case& c, std::string_view m) { return compute<double>(c, m, false); },
    .yardstick = [](const Case& c, std::string_view m) { return compute<float>(c, m, true); },
    .mistakes = kMistakes};

const Registration<JudgedOperation> kRegistered{judged<kOperation>()};

}  // namespace
}  // namespace lockstep::judging::of_batched_product
