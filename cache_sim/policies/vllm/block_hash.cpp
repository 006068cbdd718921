#include "cache_sim/policies/vllm/block_hash.hpp"

#include <openssl/sha.h>

#include <array>
#include <limits>

#include "reference/base/require.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lockstep::cache_sim {
namespace {

void put_little_endian(std::string& out, std::uint64_t value, int bytes) {
  std::array<char, 8> text;
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(value >> 8 * i & 0xFF);
  out.append(text.data(), static_cast<std::size_t>(bytes));
}
void put_big_endian(std::string& out, std::uint64_t value, int bytes) {
  std::array<char, 8> text;
  for (std::size_t i = 0; i < text.size(); ++i)
    text[i] = static_cast<char>(value >> 8 * (text.size() - 1 - i) & 0xFF);
  out.append(text.data() + text.size() - bytes, static_cast<std::size_t>(bytes));
}

/// Python's pickle of None, int, str, bytes and tuple, as CPython's `pickle.dumps(…, protocol=5)`
/// writes it: opcodes in frames of 64 KiB, every str, bytes and tuple memoized.
class Pickle {
 public:
  void none() { begin("N"); }
  void integer(std::int64_t value) {
    if (value < 0) {
      require(value >= std::numeric_limits<std::int32_t>::min(), "an offset fits 32 bits");
      begin("J");
      put_little_endian(frame_, static_cast<std::uint64_t>(value), 4);
    } else {
      token(static_cast<std::uint64_t>(value));
    }
  }
  void token(std::uint64_t value) {
    if (value < 1u << 8) {
      begin("K");
      put_little_endian(frame_, value, 1);
    } else if (value < 1u << 16) {
      begin("M");
      put_little_endian(frame_, value, 2);
    } else if (value < std::uint64_t{1} << 31) {
      begin("J");
      put_little_endian(frame_, value, 4);
    } else {  // LONG1: two's complement, as few bytes as hold the sign
      int bytes = 4;
      while (bytes < 9 && (bytes == 8 ? value >> 63 : value >> (8 * bytes - 1)) != 0) ++bytes;
      begin("\x8a");
      frame_.push_back(static_cast<char>(bytes));
      put_little_endian(frame_, value, bytes < 9 ? bytes : 8);
      if (bytes == 9) frame_.push_back('\0');
    }
  }
  void text(std::string_view value) { bytes_or_text(value, "\x8c", "X"); }
  void bytes(std::string_view value) { bytes_or_text(value, "C", "B"); }
  /// A str that the program has once, so that it is written once.
  void tag(std::string_view value) {
    for (const auto& [known, index] : tags_)
      if (known == value) {
        begin("h");
        frame_.push_back(static_cast<char>(index));
        return;
      }
    tags_.emplace_back(value, memoized_);
    text(value);
  }
  void open_tuple(std::size_t size) {
    require(size > 0, "no tuple is empty here");
    begin("");
    if (size > 3) frame_ += '(';
  }
  void close_tuple(std::size_t size) {
    frame_ += size > 3 ? 't' : static_cast<char>(0x84 + size);  // TUPLE1, TUPLE2, TUPLE3
    memoize();
  }
  std::string finish() {
    frame_ += '.';
    flush();
    return "\x80\x05" + out_;
  }

 private:
  static constexpr std::size_t kFrame = std::size_t{64} * 1024;

  /// An object begins; a frame that is full ends before it.
  void begin(std::string_view opcode) {
    if (frame_.size() >= kFrame) flush();
    frame_ += opcode;
  }
  void flush() {
    if (frame_.size() >= 4) {  // smaller ones stand without a frame
      out_ += '\x95';
      put_little_endian(out_, frame_.size(), 8);
    }
    out_ += frame_;
    frame_.clear();
  }
  void memoize() {
    frame_ += '\x94';
    ++memoized_;
  }
  void bytes_or_text(std::string_view value, std::string_view small, std::string_view large) {
    begin(value.size() < 256 ? small : large);
    put_little_endian(frame_, value.size(), value.size() < 256 ? 1 : 4);
    frame_ += value;
    memoize();
  }

  std::string out_, frame_;
  std::vector<std::pair<std::string_view, int>> tags_;
  int memoized_ = 0;
};

/// The same as canonical CBOR.
class Cbor {
 public:
  void none() { out_ += '\xf6'; }
  void integer(std::int64_t value) {
    if (value < 0)
      head(1, static_cast<std::uint64_t>(-1 - value));
    else
      token(static_cast<std::uint64_t>(value));
  }
  void token(std::uint64_t value) { head(0, value); }
  void text(std::string_view value) {
    head(3, value.size());
    out_ += value;
  }
  void bytes(std::string_view value) {
    head(2, value.size());
    out_ += value;
  }
  void tag(std::string_view value) { text(value); }
  void open_tuple(std::size_t size) { head(4, size); }
  void close_tuple(std::size_t /*size*/) {}
  std::string finish() { return std::move(out_); }

 private:
  void head(int major, std::uint64_t value) {
    const auto put = [&](int low, int bytes) {
      out_.push_back(static_cast<char>(major << 5 | low));
      put_big_endian(out_, value, bytes);
    };
    if (value < 24)
      put(static_cast<int>(value), 0);
    else if (value <= 0xFF)
      put(24, 1);
    else if (value <= 0xFFFF)
      put(25, 2);
    else if (value <= 0xFFFFFFFF)
      put(26, 4);
    else
      put(27, 8);
  }
  std::string out_;
};

template <class Writer>
void write_extra(Writer& out, const BlockExtraKeys& extra) {
  if (extra.empty()) return out.none();
  const std::size_t size = (extra.lora ? 1 : 0) + extra.images.size() +
                           (extra.cache_salt.empty() ? 0 : 1) + (extra.prompt_embeds ? 1 : 0);
  out.open_tuple(size);
  if (extra.lora) {
    out.open_tuple(3);
    out.tag("lora");
    out.text(extra.lora->first);
    out.text(extra.lora->second);
    out.close_tuple(3);
  }
  for (const BlockExtraKeys::Image& image : extra.images) {
    out.open_tuple(3);
    out.tag("mm");
    out.text(image.identifier);
    out.integer(image.offset);
    out.close_tuple(3);
  }
  if (!extra.cache_salt.empty()) {
    out.open_tuple(2);
    out.tag("cache_salt");
    out.text(extra.cache_salt);
    out.close_tuple(2);
  }
  if (extra.prompt_embeds) {
    out.open_tuple(2);
    out.tag("prompt_embeds");
    out.bytes(*extra.prompt_embeds);
    out.close_tuple(2);
  }
  out.close_tuple(size);
}

template <class Writer>
std::string block_bytes(const BlockHash& parent, std::span<const Token> tokens,
                        const BlockExtraKeys& extra, std::span<const Token> lookahead) {
  Writer out;
  out.open_tuple(3);
  out.bytes(parent);
  out.open_tuple(tokens.size());
  for (const Token token : tokens) out.token(token);
  out.close_tuple(tokens.size());
  if (lookahead.empty()) {
    write_extra(out, extra);
  } else {
    out.open_tuple(1 + lookahead.size());
    write_extra(out, extra);
    for (const Token token : lookahead) out.token(token);
    out.close_tuple(1 + lookahead.size());
  }
  out.close_tuple(3);
  return out.finish();
}

bool is_cbor(BlockHashAlgorithm algorithm) {
  return algorithm == BlockHashAlgorithm::sha256_cbor ||
         algorithm == BlockHashAlgorithm::xxhash_cbor;
}

BlockHash hash_bytes(BlockHashAlgorithm algorithm, const std::string& bytes) {
  if (algorithm == BlockHashAlgorithm::sha256 || algorithm == BlockHashAlgorithm::sha256_cbor) {
    std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
    SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data());
    return {digest.begin(), digest.end()};
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  return {std::begin(canonical.digest), std::end(canonical.digest)};
}

}  // namespace

std::optional<BlockHashAlgorithm> block_hash_algorithm_from(std::string_view name) {
  if (name == "sha256") return BlockHashAlgorithm::sha256;
  if (name == "sha256_cbor") return BlockHashAlgorithm::sha256_cbor;
  if (name == "xxhash") return BlockHashAlgorithm::xxhash;
  if (name == "xxhash_cbor") return BlockHashAlgorithm::xxhash_cbor;
  return std::nullopt;
}

BlockHash none_hash(BlockHashAlgorithm algorithm, std::string_view seed) {
  if (is_cbor(algorithm)) {
    Cbor out;
    out.text(seed);
    return hash_bytes(algorithm, out.finish());
  }
  Pickle out;
  out.text(seed);
  return hash_bytes(algorithm, out.finish());
}

BlockHash hash_block(BlockHashAlgorithm algorithm, const BlockHash& parent,
                     std::span<const Token> tokens, const BlockExtraKeys& extra,
                     std::span<const Token> lookahead) {
  return hash_bytes(algorithm, is_cbor(algorithm)
                                   ? block_bytes<Cbor>(parent, tokens, extra, lookahead)
                                   : block_bytes<Pickle>(parent, tokens, extra, lookahead));
}

}  // namespace lockstep::cache_sim
