#include "kernels/torch/static_kv/generate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "reference/layers/sampling.hpp"

namespace lockstep::static_kv {
namespace {

using Logits = std::vector<std::vector<float>>;

/// All columns of the prompts. A token's position counts the real tokens before it; padding has 0.
NewColumns columns_of(const Prompts& prompts) {
  NewColumns columns{prompts.ids, prompts.real, {}};
  for (const std::vector<char>& real : prompts.real) {
    Tokens& positions = columns.positions.emplace_back();
    std::int32_t next = 0;
    for (const char is_real : real) positions.push_back(is_real != 0 ? next++ : 0);
  }
  return columns;
}

/// The column after `last`, with one token per row.
NewColumns column_behind(const NewColumns& last, const Tokens& tokens) {
  NewColumns column;
  for (std::size_t b = 0; b < tokens.size(); ++b) {
    column.ids.push_back({tokens[b]});
    column.real.push_back({1});
    column.positions.push_back({last.positions[b].back() + 1});
  }
  return column;
}

bool has(const Tokens& tokens, std::int32_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

Result<void> check(const Prompts& prompts, const GenerateOptions& options) {
  if (prompts.ids.empty() || prompts.ids.size() != prompts.real.size())
    return fail("a batch has a prompt at least, and says of each token whether it is padding");
  const std::size_t T = prompts.ids.front().size();
  if (T == 0) return fail("a prompt has a token at least");
  for (std::size_t b = 0; b < prompts.ids.size(); ++b)
    if (prompts.ids[b].size() != T || prompts.real[b].size() != T)
      return fail("prompt " + std::to_string(b) + " is not padded to the " + std::to_string(T) +
                  " tokens of the others");
  if (options.new_tokens < 1) return fail("there is no new token to generate");
  if (options.beams > 1 && prompts.ids.size() > 1) return fail("beams are those of one prompt");
  if (options.beams > 1 && options.temperature > 0) return fail("beams are not sampled");
  return {};
}

std::int32_t next_token(const std::vector<float>& logits, const GenerateOptions& options,
                        std::size_t row, std::int64_t number) {
  return reference::sampled_token(
      make_view(logits.data(), Shape<1>{static_cast<std::int64_t>(logits.size())}),
      {.temperature = options.temperature,
       .top_k = options.top_k,
       .top_p = options.top_p,
       .seed = options.seed + row,
       .position = static_cast<std::int32_t>(number)});
}

/// ln softmax, summed in double.
std::vector<double> log_softmax(const std::vector<float>& logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  std::vector<double> scores;
  for (const float logit : logits) scores.push_back(logit - largest - std::log(sum));
  return scores;
}

struct Beam {
  Tokens text;
  double score;          ///< sum of ln p of a running beam, mean of ln p of a finished one
  std::int64_t row = 0;  ///< the row of the cache that the beam continues
};

/// Keeps the `count` best of the beams, best first.
void keep_best(std::vector<Beam>& beams, std::int64_t count) {
  std::stable_sort(beams.begin(), beams.end(),
                   [](const Beam& a, const Beam& b) { return a.score > b.score; });
  if (static_cast<std::int64_t>(beams.size()) > count)
    beams.resize(static_cast<std::size_t>(count));
}

/// The best continuations of all beams by one token: (1 + number of stop tokens) times the number
/// of beams, so that enough running ones are left if the best ones end.
std::vector<Beam> continuations(const std::vector<Beam>& running, const Logits& logits,
                                const GenerateOptions& options) {
  std::vector<Beam> all;
  for (std::size_t i = 0; i < running.size(); ++i) {
    const std::vector<double> scores = log_softmax(logits[i]);
    for (std::size_t v = 0; v < scores.size(); ++v)
      all.push_back({{static_cast<std::int32_t>(v)},
                     running[i].score + scores[v],
                     static_cast<std::int64_t>(i)});
  }
  keep_best(all, options.beams *
                     std::max<std::int64_t>(2, 1 + static_cast<std::int64_t>(options.stop.size())));
  for (Beam& beam : all) {
    Tokens text = running[static_cast<std::size_t>(beam.row)].text;
    text.push_back(beam.text.front());
    beam.text = std::move(text);
  }
  return all;
}

Result<std::vector<Tokens>> search_beams(CachedModel& model, const Prompts& prompts,
                                         const GenerateOptions& options) {
  const auto count = static_cast<std::size_t>(options.beams);
  NewColumns columns =
      columns_of({std::vector<Tokens>(count, prompts.ids[0]), {count, prompts.real[0]}});
  // One beam starts; the first step makes the others from it.
  std::vector<Beam> running{{prompts.ids[0], 0.0}}, finished;
  for (std::int64_t n = 1;; ++n) {
    const auto logits = model.append(columns);
    if (!logits) return tl::unexpected(logits.error());
    std::vector<Beam> next;
    const std::vector<Beam> candidates = continuations(running, *logits, options);
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const Beam& beam = candidates[i];
      const bool ends = n == options.new_tokens || has(options.stop, beam.text.back());
      if (!ends && next.size() < count) next.push_back(beam);
      if (ends && i < count)  // only a beam among the `count` best may end
        finished.push_back({beam.text, beam.score / static_cast<double>(n)});
    }
    keep_best(finished, options.beams);
    if (n == options.new_tokens || next.empty()) break;
    // Stop when no running beam, by its mean at the present length, beats the worst finished one.
    if (finished.size() == count &&
        next.front().score / static_cast<double>(n) <= finished.back().score)
      break;
    Tokens tokens;
    std::vector<std::int64_t> rows;
    for (const Beam& beam : next) {
      tokens.push_back(beam.text.back());
      rows.push_back(beam.row);
    }
    model.reorder(rows);
    columns = column_behind(columns, tokens);
    running = std::move(next);
  }
  return std::vector<Tokens>{finished.front().text};
}

}  // namespace

Result<std::vector<Tokens>> generate(CachedModel& model, const Prompts& prompts,
                                     const GenerateOptions& options) {
  if (const auto checked = check(prompts, options); !checked)
    return tl::unexpected(checked.error());
  model.clear();
  if (options.beams > 1) return search_beams(model, prompts, options);
  std::vector<Tokens> texts = prompts.ids;
  std::vector<char> ended(texts.size(), 0);
  NewColumns columns = columns_of(prompts);
  for (std::int64_t n = 0; n < options.new_tokens; ++n) {
    if (n > 0 && std::all_of(ended.begin(), ended.end(), [](char is) { return is != 0; })) break;
    const auto logits = model.append(columns);
    if (!logits) return tl::unexpected(logits.error());
    Tokens tokens;
    for (std::size_t b = 0; b < texts.size(); ++b) {
      const std::int32_t token =
          ended[b] != 0 ? options.pad : next_token((*logits)[b], options, b, n);
      tokens.push_back(token);
      texts[b].push_back(token);
      if (has(options.stop, token)) ended[b] = 1;
    }
    columns = column_behind(columns, tokens);
  }
  return texts;
}

}  // namespace lockstep::static_kv
