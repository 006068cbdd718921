#include "kernels/torch/static_kv/runtime.hpp"

#include <ATen/ATen.h>

#include <limits>

namespace lockstep::static_kv {

Result<std::vector<Call>> plan_calls(std::int64_t length, std::int64_t past,
                                     const Programs& programs, bool split) {
  if (past + length > programs.positions)
    return fail(std::to_string(past) + " cached and " + std::to_string(length) +
                " new tokens do not fit into a cache of " + std::to_string(programs.positions));
  std::vector<Call> calls;
  while (length > 0) {
    // The smallest bucket that holds the tokens, and the largest that they fill; buckets are
    // sorted.
    std::int64_t holding = 0, filled = 1;
    for (const auto& [Q, program] : programs.buckets) {
      if (Q == 1 || past + Q > programs.positions) continue;
      if (Q <= length) filled = Q;
      if (Q >= length && length > 1 && holding == 0) holding = Q;
    }
    if (holding == 0 && length > 1 && !split)
      return fail(std::to_string(length) + " tokens behind " + std::to_string(past) +
                  " are more than the last bucket holds");
    const Call call{std::min(length, holding > 0 ? holding : filled),
                    holding > 0 ? holding : filled};
    if (!programs.buckets.contains(call.Q))
      return fail("there is no bucket of one token, which decodes need");
    calls.push_back(call);
    past += call.tokens;
    length -= call.tokens;
  }
  return calls;
}

Runtime::Runtime(Programs programs) : programs_(std::move(programs)) {
  clear();
}

void Runtime::clear() {
  const auto& c = programs_.config;
  const auto nan = std::numeric_limits<double>::quiet_NaN();  // unwritten places must not be read
  keys_ = at::full(
      {c.num_hidden_layers, programs_.rows, c.num_key_value_heads, programs_.positions, c.head_dim},
      nan, programs_.head.options());
  values_ = keys_.clone();
  mask_ = at::zeros({programs_.rows, programs_.positions}, at::kBool);
  length_ = rows_ = 0;
}

void Runtime::reorder(const std::vector<std::int64_t>& rows) {
  at::Tensor order = at::arange(programs_.rows, at::kLong);
  for (std::size_t i = 0; i < rows.size(); ++i) order[static_cast<std::int64_t>(i)] = rows[i];
  const at::Tensor there = order.to(keys_.device());
  keys_ = keys_.index_select(1, there);
  values_ = values_.index_select(1, there);
  mask_ = mask_.index_select(0, order);
}

Result<void> Runtime::adopt(const at::Tensor& keys, const at::Tensor& values,
                            const std::vector<std::vector<char>>& real, std::int64_t length) {
  for (const at::Tensor& tensor : {keys, values}) {
    if (tensor.scalar_type() != keys_.scalar_type())
      return fail(std::string("the cache holds ") + at::toString(tensor.scalar_type()) +
                  ", the model was exported with " + at::toString(keys_.scalar_type()));
    if (tensor.sizes() != keys_.sizes())
      return fail("the cache has another shape than the model was exported with");
  }
  if (length > programs_.positions || static_cast<std::int64_t>(real.size()) > programs_.rows)
    return fail("the cache has more tokens or rows than the model was exported with");
  clear();
  keys_ = keys.contiguous().clone();
  values_ = values.contiguous().clone();
  for (std::size_t b = 0; b < real.size(); ++b)
    for (std::size_t j = 0; j < real[b].size(); ++j)
      mask_[static_cast<std::int64_t>(b)][static_cast<std::int64_t>(j)] = real[b][j] != 0;
  length_ = length;
  rows_ = static_cast<std::int64_t>(real.size());
  return {};
}

std::vector<at::Tensor> Runtime::inputs_of(const NewColumns& columns, std::int64_t begin,
                                           const Call& call) {
  const std::int64_t R = programs_.rows;
  at::Tensor ids = at::zeros({R, call.Q}, at::kLong), positions = at::zeros({R, call.Q}, at::kLong);
  at::Tensor mask = mask_.clone();
  auto id = ids.accessor<std::int64_t, 2>(), position = positions.accessor<std::int64_t, 2>();
  auto seen = mask.accessor<bool, 2>();
  for (std::size_t b = 0; b < columns.ids.size(); ++b)
    for (std::int64_t i = 0; i < call.tokens; ++i) {
      const auto row = static_cast<std::int64_t>(b);
      const auto column = static_cast<std::size_t>(begin + i);
      id[row][i] = columns.ids[b][column];
      position[row][i] = columns.positions[b][column];
      seen[row][length_ + i] = columns.real[b][column] != 0;
    }
  mask_ = mask;
  const at::Device device = keys_.device();
  return {ids.to(device),
          mask.to(device),
          keys_,
          values_,
          at::arange(length_, length_ + call.Q, at::device(device).dtype(at::kLong)),
          positions.to(device)};
}

void Runtime::commit(const at::Tensor& new_k, const at::Tensor& new_v, const Call& call) {
  const auto written = [&](const at::Tensor& tensor) {
    return tensor.narrow(3, length_, call.tokens).narrow(1, 0, rows_);
  };
  written(keys_).copy_(written(new_k));
  written(values_).copy_(written(new_v));
  length_ += call.tokens;
}

Result<std::vector<Call>> calls_of(const NewColumns& columns, std::int64_t length,
                                   std::int64_t rows, const Programs& programs, bool split) {
  const auto B = static_cast<std::int64_t>(columns.ids.size());
  if (B > programs.rows)
    return fail(std::to_string(B) + " rows are more than the " + std::to_string(programs.rows) +
                " that the model was exported with");
  if (rows != 0 && B != rows)
    return fail("the cache has " + std::to_string(rows) + " rows, not " + std::to_string(B));
  for (const Tokens& row : columns.ids)
    for (const std::int32_t token : row)
      if (token < 0 || token >= programs.config.vocab_size)
        return fail("token " + std::to_string(token) + " is not below the vocabulary's " +
                    std::to_string(programs.config.vocab_size));
  return plan_calls(static_cast<std::int64_t>(columns.ids.front().size()), length, programs, split);
}

std::vector<std::vector<float>> rows_of(const at::Tensor& logits, std::int64_t rows) {
  const at::Tensor there = logits.narrow(0, 0, rows).to(at::kCPU, at::kFloat).contiguous();
  std::vector<std::vector<float>> list;
  for (std::int64_t b = 0; b < rows; ++b) {
    const float* const first = there.const_data_ptr<float>() + b * there.size(1);
    list.emplace_back(first, first + there.size(1));
  }
  return list;
}

Result<at::Tensor> Runtime::launch(const NewColumns& columns) {
  const auto calls = calls_of(columns, length_, rows_, programs_, split);
  if (!calls) return tl::unexpected(calls.error());
  const auto B = static_cast<std::int64_t>(columns.ids.size());
  rows_ = B;
  std::int64_t begin = 0;
  at::Tensor last;  // [B, D]
  for (const Call& call : *calls) {
    const auto outputs = programs_.buckets.at(call.Q)(inputs_of(columns, begin, call));
    commit(outputs[1], outputs[2], call);
    last = outputs[0].narrow(0, 0, B).select(1, call.tokens - 1);
    begin += call.tokens;
  }
  return at::matmul(last, programs_.head.t());
}

Result<std::vector<std::vector<float>>> Runtime::append(const NewColumns& columns) {
  const auto logits = launch(columns);
  if (!logits) return tl::unexpected(logits.error());
  return rows_of(*logits, rows_);
}

}  // namespace lockstep::static_kv
