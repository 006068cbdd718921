// Embedding vectors of tokens, and logits of tokens from vectors. Press, Wolf 2017, "Using the
// Output Embedding to Improve Language Models": one table may serve both.
//
//   here     field              shape
//   tokens   input_ids          [T]       negative: padding, whose vector is 0
//   table    embed_tokens       [V, D]
//   x        hidden_states      [T, D]
//   head     lm_head            [V, D]
//   logits   logits             [T, V]    logits_t = head x_t
#pragma once

#include "reference/layers/product.hpp"

namespace lockstep::reference {

template <class S>
void embedding(const IndexView& tokens, const TensorView<const S, 2>& table, TensorView<S, 2> out) {
  for (std::int64_t t = 0; t < tokens.extent(0); ++t) {
    require(tokens(t) < table.extent(0), "a token is below the size of the vocabulary");
    if (tokens(t) < 0)
      fill(at(out, t), S{0});
    else
      mapped(at(out, t)) = mapped(at(table, tokens(t)));
  }
}

template <class S>
void logits(const TensorView<const S, 2>& x, const TensorView<const S, 2>& head,
            TensorView<S, 2> out) {
  product<S>(x, head, out);
}

}  // namespace lockstep::reference
