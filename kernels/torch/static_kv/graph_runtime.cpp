#include "kernels/torch/static_kv/graph_runtime.hpp"

#include <ATen/ATen.h>

#include <limits>

#include "reference/base/require.hpp"

namespace lockstep::static_kv {
namespace {

/// Elements that one [R, Q] table takes among a bucket's int64 inputs: an even number, because
/// compiled programs need tables at multiples of 16 bytes.
std::int64_t table_size(std::int64_t rows, std::int64_t Q) {
  return (rows * Q + 1) / 2 * 2;
}

/// Table i of a bucket's inputs: 0 ids, 1 positions, 2 real.
at::Tensor table_of(const at::Tensor& inputs, std::int64_t i, std::int64_t rows, std::int64_t Q) {
  return inputs.narrow(0, i * table_size(rows, Q), rows * Q).view({rows, Q});
}

/// Scalar i of a bucket's inputs: 0 tokens, 1 rows.
at::Tensor scalar_of(const at::Tensor& inputs, std::int64_t i) {
  return inputs.select(0, inputs.size(0) - 2 + i);
}

}  // namespace

std::function<void()> called(const std::function<void()>& step,
                             const std::function<void()>& clear) {
  for (int i = 0; i < kWarmUps; ++i) {
    step();
    clear();
  }
  return step;
}

GraphRuntime::GraphRuntime(Programs programs) : programs_(std::move(programs)) {
  const auto& c = programs_.config;
  const at::Device device = programs_.head.device();
  const auto nan = std::numeric_limits<double>::quiet_NaN();  // unwritten places must not be read
  state_.keys = at::full(
      {c.num_hidden_layers, programs_.rows, c.num_key_value_heads, programs_.positions, c.head_dim},
      nan, programs_.head.options());
  state_.values = state_.keys.clone();
  state_.mask =
      at::zeros({programs_.rows, programs_.positions}, at::device(device).dtype(at::kBool));
  state_.length = at::zeros({}, at::device(device).dtype(at::kLong));
}

void GraphRuntime::capture(const Record& record) {
  require(buckets_.empty(), "buckets are captured once");
  const at::Device device = programs_.head.device();
  for (const auto& [Q, program] : programs_.buckets) {
    require(Q <= programs_.positions, "a bucket fits into the cache");
    Bucket& bucket = buckets_[Q];
    bucket.Q = Q;
    bucket.host = at::zeros({3 * table_size(programs_.rows, Q) + 2}, at::kLong);
    table_of(bucket.host, 2, programs_.rows, Q).fill_(1);  // warm-ups run all columns and rows
    scalar_of(bucket.host, 0).fill_(Q);
    scalar_of(bucket.host, 1).fill_(programs_.rows);
    bucket.inputs = bucket.host.to(device, false, true);
    bucket.logits = at::empty({programs_.rows, programs_.head.size(0)}, programs_.head.options());
    // The lambda copies the tensor handles: like a graph, it keeps using these tensors even if the
    // runtime later replaces its own.
    bucket.replay =
        record([this, state = state_, bucket, run = program] { step(state, bucket, run); },
               [this] { forget_warm_ups(); });
  }
}

void GraphRuntime::forget_warm_ups() {
  state_.keys.fill_(std::numeric_limits<double>::quiet_NaN());
  state_.values.fill_(std::numeric_limits<double>::quiet_NaN());
  clear();
}

at::Tensor GraphRuntime::cache_position(const State& state, std::int64_t Q) const {
  return at::arange(Q, state.length.options()) + state.length;
}

at::Tensor GraphRuntime::committed(const at::Tensor& tokens, const at::Tensor& rows,
                                   std::int64_t Q) const {
  const at::Tensor column = at::arange(Q, tokens.options()).unsqueeze(0);
  const at::Tensor row = at::arange(programs_.rows, rows.options()).unsqueeze(1);
  return column.lt(tokens).logical_and(row.lt(rows));
}

void GraphRuntime::step(const State& state, const Bucket& bucket, const Program& program) const {
  const std::int64_t R = programs_.rows, Q = bucket.Q;
  const at::Tensor ids = table_of(bucket.inputs, 0, R, Q),
                   positions = table_of(bucket.inputs, 1, R, Q),
                   real = table_of(bucket.inputs, 2, R, Q), tokens = scalar_of(bucket.inputs, 0),
                   rows = scalar_of(bucket.inputs, 1);
  const at::Tensor position = cache_position(state, Q), written = committed(tokens, rows, Q);
  state.mask.index_copy_(1, position, real.ne(0));  // 0 in the bucket's tail and in unused rows
  const auto outputs = program({ids, state.mask, state.keys, state.values, position, positions});
  require(outputs.size() == 3 || outputs.size() == 1,
          "a program gives sidecars, or has written the cache itself");
  const auto commit = [&](const at::Tensor& cache, const at::Tensor& sidecar) {
    const at::Tensor where = written.view({1, R, 1, Q, 1});
    cache.index_copy_(
        3, position,
        at::where(where, sidecar.index_select(3, position), cache.index_select(3, position)));
  };
  if (outputs.size() == 3) {
    commit(state.keys, outputs[1]);
    commit(state.values, outputs[2]);
  }
  const at::Tensor last = outputs[0].index_select(1, (tokens - 1).view({1})).squeeze(1);  // [R, D]
  at::Tensor logits = bucket.logits;
  at::matmul_out(logits, last, programs_.head.t());
  state.length.add_(tokens);
}

void GraphRuntime::fill(Bucket& bucket, const NewColumns& columns, std::int64_t begin,
                        const Call& call) const {
  bucket.host.zero_();
  const std::int64_t R = programs_.rows, Q = call.Q;
  auto* const ids = bucket.host.data_ptr<std::int64_t>();
  auto* const positions = ids + table_size(R, Q);
  auto* const real = positions + table_size(R, Q);
  for (std::size_t b = 0; b < columns.ids.size(); ++b)
    for (std::int64_t i = 0; i < call.tokens; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(b) * Q + i;
      const auto column = static_cast<std::size_t>(begin + i);
      ids[at] = columns.ids[b][column];
      positions[at] = columns.positions[b][column];
      real[at] = columns.real[b][column] != 0 ? 1 : 0;
    }
  scalar_of(bucket.host, 0).fill_(call.tokens);
  scalar_of(bucket.host, 1).fill_(static_cast<std::int64_t>(columns.ids.size()));
  bucket.inputs.copy_(bucket.host);
}

Result<at::Tensor> GraphRuntime::launch(const NewColumns& columns) {
  require(!buckets_.empty(), "buckets are captured before the first text");
  const auto calls = calls_of(columns, length_, rows_, programs_, split);
  if (!calls) return tl::unexpected(calls.error());
  rows_ = static_cast<std::int64_t>(columns.ids.size());
  std::int64_t begin = 0;
  for (const Call& call : *calls) {
    Bucket& bucket = buckets_.at(call.Q);
    fill(bucket, columns, begin, call);
    bucket.replay();
    begin += call.tokens;
    length_ += call.tokens;
  }
  return buckets_.at(calls->back().Q).logits;
}

Result<std::vector<std::vector<float>>> GraphRuntime::append(const NewColumns& columns) {
  const auto logits = launch(columns);
  if (!logits) return tl::unexpected(logits.error());
  return rows_of(*logits, rows_);
}

void GraphRuntime::reorder(const std::vector<std::int64_t>& rows) {
  at::Tensor order = at::arange(programs_.rows, at::kLong);
  for (std::size_t i = 0; i < rows.size(); ++i) order[static_cast<std::int64_t>(i)] = rows[i];
  order = order.to(state_.keys.device());
  state_.keys.copy_(state_.keys.index_select(1, order));
  state_.values.copy_(state_.values.index_select(1, order));
  state_.mask.copy_(state_.mask.index_select(0, order));
}

void GraphRuntime::clear() {
  state_.mask.zero_();
  state_.length.zero_();
  length_ = rows_ = 0;
}

}  // namespace lockstep::static_kv
