// Shared by the tests of kernels: whether there is a GPU, complaints about arguments that nothing
// ever reads, graphs, batches that hurt, and comparisons.
#pragma once

#include <gtest/gtest.h>

#include "kernels/base/check.hpp"
#include "kernels/base/device_tensor.hpp"
#include "kernels/base/launch_note.hpp"
#include "properties/support/accuracy_log.hpp"
#include "properties/support/laws.hpp"
#include "reference/recurrent/recurrence.hpp"
#include "reference/tensors/yardstick.hpp"

namespace lockstep::testing_support {

/// Skips its test where there is no GPU.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no GPU";
  }
};

inline void finish() {
  kernels::check_cuda(cudaDeviceSynchronize(), "a kernel");
}

/// A view for calls that are refused before anybody looks at an element: no GPU is needed.
template <class T, std::size_t Rank>
TensorView<T, Rank> unread(const Shape<Rank>& shape) {
  alignas(16) static std::remove_const_t<T> element{};
  return make_view<T>(&element, shape);
}
template <class T, std::size_t Rank>
TensorView<T, Rank> unread(const Shape<Rank>& shape, const Shape<Rank>& strides) {
  alignas(16) static std::remove_const_t<T> element{};
  return make_view<T>(&element, shape, strides);
}

/// The complaint about the arguments of a call; "nothing" where it is taken.
template <class Call>
std::string complaint_of(Call call) {
  try {
    call();
  } catch (const kernels::ArgumentError& error) {
    return error.what();
  }
  return "nothing";
}

/// Captures what `run` launches on the stream that it is given, lets `change` give its buffers
/// other contents, and launches what was captured.
template <class Run, class Change>
void replay_behind_change(Run run, Change change) {
  using kernels::check_cuda;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replayable;
  check_cuda(cudaStreamCreate(&stream), "a stream");
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "a capture");
  run(stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "a capture");
  check_cuda(cudaGraphInstantiate(&replayable, graph, 0), "a graph");
  change();
  check_cuda(cudaGraphLaunch(replayable, stream), "a graph");
  finish();
  cudaGraphExecDestroy(replayable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/// Numbers on the grid: exact in every type.
template <std::size_t Rank>
Array<double, Rank> draw(const Shape<Rank>& shape, std::uint64_t seed, std::uint64_t stream) {
  return on_grid<double>(shape, {.seed = seed, .stream = stream});
}

/// Rows of a batch over the slots of a pool: some rows padding, every other one with a slot of its
/// own, and slots that nobody uses.
struct Batch {
  Sizes lengths;
  std::int64_t tokens = 0;
  std::int64_t slots = 0;
  std::int64_t columns = 0;  ///< of the table; 0: a list
  Array<std::int32_t, 1> starts, accepted;
  Array<std::int32_t, 2> table;                       // [N, columns or 1]
  Array<std::int32_t, 1> indices;                     // column 0 of it
  std::optional<Array<std::int32_t, 2>> out_table{};  // [N, columns]: where states go instead

  std::int64_t rows() const { return static_cast<std::int64_t>(lengths.size()); }

  /// A pure function of the seed. Lengths up to `most`; at least one.
  static Batch draw(std::uint64_t seed, std::int64_t rows, std::int64_t most, bool with_table) {
    Batch batch;
    const auto below = [&](std::int64_t bound, std::uint64_t index) {
      return static_cast<std::int64_t>(
          random_below(static_cast<std::uint64_t>(bound), seed, 200, index));
    };
    for (std::int64_t n = 0; n < rows; ++n)
      batch.lengths.push_back(most == 1 ? 1 : below(most + 1, static_cast<std::uint64_t>(n)));
    batch.tokens = sum(batch.lengths) + (most == 1 ? 0 : below(3, 999));  // padding after the rows
    batch.starts = starts_of(batch.lengths);
    batch.columns = with_table ? most : 0;
    const std::int64_t width = std::max<std::int64_t>(batch.columns, 1);
    batch.slots = rows * width + 3;
    Sizes order(static_cast<std::size_t>(batch.slots));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1],
                order[static_cast<std::size_t>(below(static_cast<std::int64_t>(i), 1000 + i))]);
    batch.table = Array<std::int32_t, 2>(Shape<2>{rows, width}, -1);
    batch.accepted = Array<std::int32_t, 1>(Shape<1>{rows}, 0);
    batch.indices = Array<std::int32_t, 1>(Shape<1>{rows}, -1);
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t c = 0; c < width; ++c)
        batch.table(n, c) =
            static_cast<std::int32_t>(order[static_cast<std::size_t>(n * width + c)]);
      batch.accepted(n) = static_cast<std::int32_t>(below(width + 1, 3000 + n));  // 0 counts as 1
      if (rows > 1 && below(5, 4000 + static_cast<std::uint64_t>(n)) == 0)
        for (std::int64_t c = 0; c < width; ++c) batch.table(n, c) = c % 2 ? -1 : -7;  // padding
      batch.indices(n) = batch.table(n, 0);
    }
    return batch;
  }

  /// The same with a table of other slots for the new states; column 1 goes nowhere.
  Batch with_targets() const {
    Batch batch = *this;
    batch.out_table = Array<std::int32_t, 2>(table.shape(), -1);
    for (std::int64_t i = 0; i < table.size(); ++i)
      if (i % columns != 1)
        batch.out_table->data()[i] = static_cast<std::int32_t>(slots + table.size() - 1 - i);
    batch.slots += table.size();
    return batch;
  }

  StateSlots host() const {
    if (columns == 0) return {.indices = indices.view()};
    StateSlots all{.table = table.view(), .num_accepted = accepted.view()};
    if (out_table) all.out_table = out_table->view();
    return all;
  }
};

/// The batch's index arrays on the device.
struct DeviceBatch {
  explicit DeviceBatch(const Batch& batch)
      : columns(batch.columns),
        starts(batch.starts),
        accepted(batch.accepted),
        indices(batch.indices),
        table(batch.table) {
    if (batch.out_table) out_table.emplace(*batch.out_table);
  }

  StateSlots slots() const {
    if (columns == 0) return {.indices = indices.view()};
    StateSlots all{.table = table.view(), .num_accepted = accepted.view()};
    if (out_table) all.out_table = std::as_const(*out_table).view();
    return all;
  }

  std::int64_t columns;
  kernels::DeviceTensor<std::int32_t, 1> starts, accepted, indices;
  kernels::DeviceTensor<std::int32_t, 2> table;
  std::optional<kernels::DeviceTensor<std::int32_t, 2>> out_table;
};

/// A list of slots as column 17 of an int32 tensor of 40,000 columns on the device.
class WideColumn {
 public:
  explicit WideColumn(const Array<std::int32_t, 1>& list) : wide_(Shape<2>{list.extent(0), 40000}) {
    kernels::check_cuda(
        cudaMemcpy2D(wide_.data() + 17, 40000 * sizeof(std::int32_t), list.data(),
                     sizeof(std::int32_t), sizeof(std::int32_t),
                     static_cast<std::size_t>(list.extent(0)), cudaMemcpyHostToDevice),
        "a copy");
  }
  IndexView view() const {
    return make_view(std::as_const(wide_).data() + 17, Shape<1>{wide_.shape()[0]}, Shape<1>{40000});
  }

 private:
  kernels::DeviceTensor<std::int32_t, 2> wide_;
};

/// Rows at which launches change: few wait more than they move, many fill L2.
constexpr std::int64_t kBatchRows[] = {1, 8, 9, 127, 128, 512};

/// The kernel that a recurrence's update with states of type S is to launch for so many rows: one
/// for a token each, or one for the chains of tokens that query_start_loc and tables name.
template <class S>
std::string expected_update(bool chains, std::int64_t rows) {
  const std::string tiling = sizeof(S) <= 2 ? " 4x1" : " 2x1";
  const std::string kept = rows >= 128 ? " cached" : "";
  if (chains) return rows <= 8 ? "staged 2x4" : "chain" + tiling + kept;
  return rows <= 8 ? "step 4x1 cached" : "step" + tiling + kept;
}

/// Activations and states that the updates of recurrences, and the convolutions, are built for.
using UpdateTypes = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    std::pair<kernels::Bf16, kernels::Fp16>, std::pair<kernels::Fp16, float>,
    std::pair<kernels::Fp16, kernels::Fp16>, std::pair<float, float>,
    std::pair<float, kernels::Bf16>,
#endif
    std::pair<kernels::Bf16, float>, std::pair<kernels::Bf16, kernels::Bf16>>;
using ConvolutionTypes = ::testing::Types<
#ifdef LOCKSTEP_ALL_SHAPES
    std::pair<kernels::Fp16, kernels::Fp16>, std::pair<float, float>,
    std::pair<float, kernels::Bf16>,
#endif
    std::pair<kernels::Bf16, float>, std::pair<kernels::Bf16, kernels::Bf16>>;

/// The points where an update or a convolution rounds.
template <class T, class S>
StoragePoints storage_of() {
  return {.state = kernels::format_of<S>(), .output = kernels::format_of<T>()};
}

/// States at boundaries of every so many tokens that rows of these lengths leave.
inline std::int64_t boundary_count(const Sizes& lengths, std::int64_t every) {
  std::int64_t count = 0;
  for (const std::int64_t length : lengths) count += every > 0 ? length / every : 0;
  return count;
}

/// A result held against the yardstick, and noted under `operation`.
template <class T, std::size_t Rank>
::testing::AssertionResult within_yardstick(const std::string& operation, const std::string& what,
                                            const Array<float, Rank>& actual,
                                            const Array<float, Rank>& yardstick,
                                            const Array<double, Rank>& truth) {
  const Verdict verdict = judge(actual, yardstick, truth, {.format = kernels::format_of<T>()});
  AccuracyLog::get().add(operation, what + " " + kernels::name_of(kernels::format_of<T>()),
                         verdict);
  if (verdict.pass) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << verdict.text;
}

template <class T, std::size_t Rank>
::testing::AssertionResult within_yardstick(const std::string& operation, const std::string& what,
                                            const kernels::DeviceTensor<T, Rank>& actual,
                                            const Array<float, Rank>& yardstick,
                                            const Array<double, Rank>& truth) {
  if (!actual.guards_intact())
    return ::testing::AssertionFailure() << "bytes beside the tensor were written";
  return within_yardstick<T>(operation, what, actual.host(), yardstick, truth);
}

/// The elements of a view, contiguous.
template <AnyView V>
auto contiguous(const V& view) {
  Array<std::remove_const_t<ElementOf<V>>, V::rank()> array(shape_of(view));
  std::int64_t i = 0;
  for_each_element(view, [&](const auto&, const auto& element) { array.data()[i++] = element; });
  return array;
}

/// The array with its last two dimensions exchanged, where that is asked for.
template <class Element, std::size_t Rank>
Array<Element, Rank> turned_if(bool asked, const Array<Element, Rank>& array) {
  return asked ? contiguous(transposed(array.view())) : array;
}

/// Parents of every token of the batch; with invalid ones among them.
inline Array<std::int32_t, 1> draw_tree(const Batch& batch, std::uint64_t seed) {
  Array<std::int32_t, 1> parents(Shape<1>{batch.tokens}, -1);
  for (std::int64_t n = 0; n < batch.rows(); ++n)
    for (std::int64_t i = 0; i < batch.lengths[static_cast<std::size_t>(n)]; ++i) {
      const std::int64_t t = batch.starts(n) + i;
      const auto draw =
          static_cast<std::int64_t>(random_below(12, seed, 300, static_cast<std::uint64_t>(t)));
      parents(t) = static_cast<std::int32_t>(i == 0 ? -1 : draw % i);
      if (draw == 11) parents(t) = static_cast<std::int32_t>(i);
    }
  return parents;
}

template <class T, std::size_t Rank>
bool same_bits(const kernels::DeviceTensor<T, Rank>& a, const kernels::DeviceTensor<T, Rank>& b) {
  const auto x = a.elements(), y = b.elements();
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

}  // namespace lockstep::testing_support
