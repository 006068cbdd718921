#include "cache_sim/policies/vllm/block_keys.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "cache_sim/policies/vllm/block_rules.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {
namespace {

/// A document for a token that stands for more than itself, among those that no short name has.
Document keyed_document(Token token, const std::string& with) {
  Digest digest;
  digest.add(token);
  for (const char c : with) digest.add(static_cast<unsigned char>(c));
  return 0xC000'0000u | static_cast<Document>(digest.value >> 34);
}

}  // namespace

Tokens keyed_tokens(const Tokens& tokens, const ContentKeys& keys) {
  if (keys.empty()) return tokens;
  std::map<std::uint32_t, std::string> marks;
  if (keys.salt.exists()) marks[0] += "salt " + keys.salt.text();
  if (keys.lora.exists()) marks[0] += "lora " + keys.lora.text();
  for (const ImageSpan& image : keys.images) marks[image.begin] += "image " + image.name.text();
  std::vector<Tokens> pieces;
  std::uint32_t at = 0;
  for (const auto& [place, mark] : marks) {
    if (place >= tokens.size()) break;
    pieces.push_back(tokens.slice(at, place));
    pieces.push_back(Tokens::of_document(keyed_document(tokens[place], mark), 0, 1));
    at = place + 1;
  }
  pieces.push_back(tokens.slice(at, tokens.size()));
  return Tokens::concatenated(pieces);
}

KeyTable::KeyTable(std::uint32_t hash_block, std::uint32_t lookahead,
                   std::optional<BlockHashAlgorithm> algorithm)
    : hash_block_(hash_block), lookahead_(lookahead), algorithm_(algorithm) {
  if (algorithm) none_ = none_hash(*algorithm, kNoneHashSeed);
}

void KeyTable::extend(std::vector<KeyId>& keys, const Tokens& tokens, std::uint32_t size,
                      const ContentKeys& content) {
  for (;;) {
    const auto end = static_cast<std::uint32_t>((keys.size() + 1) * hash_block_);
    if (end + lookahead_ > size) return;
    if (algorithm_) {
      keys.push_back(chained(keys, tokens, content));
      continue;
    }
    Digest hash;
    hash.add(tokens.digest(end + lookahead_));
    hash.add(end);
    hash.add(content.salt.index());
    hash.add(content.lora.index());
    for (const ImageSpan& image : content.images) {
      if (image.begin >= end + lookahead_) break;
      hash.add(image.begin);
      const std::int64_t reaches = ceil_div(image.end(), hash_block_) * hash_block_;
      hash.add(static_cast<std::uint64_t>(std::min<std::int64_t>(end, reaches)));
      hash.add(image.name.index());
    }
    keys.push_back(ids_.try_emplace(hash.value, static_cast<KeyId>(ids_.size())).first->second);
  }
}

/// The key after those in the list.
KeyId KeyTable::chained(const std::vector<KeyId>& keys, const Tokens& tokens,
                        const ContentKeys& content) {
  const auto begin = static_cast<std::uint32_t>(keys.size() * hash_block_);
  block_.clear();
  for (std::uint32_t i = begin; i < begin + hash_block_ + lookahead_; ++i)
    block_.push_back(tokens[i]);
  BlockExtraKeys extra;
  if (keys.empty() && content.salt.exists()) extra.cache_salt = content.salt.text();
  if (content.lora.exists()) extra.lora = {content.lora.text(), "/" + content.lora.text()};
  for (const ImageSpan& image : content.images)
    if (image.begin < begin + block_.size() && image.end() > begin)
      extra.images.push_back({image.name.text(), std::int64_t{image.begin} - std::int64_t{begin}});
  const std::span<const Token> all(block_);
  const auto [place, is_new] =
      ids_of_hash_.try_emplace(hash_block(*algorithm_, keys.empty() ? none_ : *hashes_[keys.back()],
                                          all.first(hash_block_), extra, all.subspan(hash_block_)),
                               static_cast<KeyId>(hashes_.size()));
  if (is_new) hashes_.push_back(&place->first);
  return place->second;
}

}  // namespace lockstep::cache_sim
