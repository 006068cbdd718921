// The line grammar: operations are printed as they were read, and bad lines are refused by name.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep {
namespace {

Result<Operation> operation_of(std::string_view text) {
  return parse_line(text).and_then([](const Line& line) { return parse_operation(line); });
}

// --- Lines ---------------------------------------------------------------------------------------

TEST(Lines, areAVerbAndFields) {
  const Result<Line> line = parse_line("\t admit  id=r1\ttokens=a8 ");
  ASSERT_TRUE(line) << line.error().text;
  EXPECT_EQ(line->verb, "admit");
  ASSERT_EQ(line->fields.size(), 2u);
  EXPECT_EQ(line->find("tokens"), "a8");
  EXPECT_FALSE(line->find("token"));
  EXPECT_EQ(parse_line("x a=b=c")->find("a"), "b=c") << "a value may hold an equals sign";
  EXPECT_EQ(parse_line("x a=")->find("a"), "");
  EXPECT_EQ(parse_line("")->verb, "");
}

TEST(Lines, thatAreMalformedAreRefused) {
  for (const std::string text :
       {"id=r1", "x y", "x =y", "x a=1 a=2", "x a=\x01", "x\x7f", "\x1b[1m"})
    EXPECT_FALSE(parse_line(text)) << text;
  std::string many = "x";
  for (int i = 0; i < 65; ++i) many += " f" + std::to_string(i) + "=1";
  EXPECT_FALSE(parse_line(many));
  EXPECT_EQ(parse_line("x a=\x01").error().text,
            "column 5: the control character 1 cannot stand here");
  EXPECT_EQ(parse_reply("n=1\x01", Verb::extend).error().text,
            "column 4: the control character 1 cannot stand here");
}

// --- Operations ----------------------------------------------------------------------------------

// One line of each verb with every field it has, in the order of printing.
const std::vector<std::string> kFullLines = {
    "admit external=3 id=r prompt=4 salt=s tokens=a8+[1,2]",
    "extend async=1 drafts=[5] id=r n=3 tokens=a1",
    "accept id=r n=0 tokens=b3:4",
    "checkpoint id=r up_to=64",
    "finish id=r insert=0",
    "abort id=r",
    "preempt id=r",
    "step ids=r,s,t padded=8",
    "complete id=r",
    "capture as=c id=r partial=1",
    "restore from=c id=r",
    "compact mapping=-1,0,1",
    "evict kv=3 state=0 tier=host",
    "flush",
    "check",
    "match limit=0 salt=s tokens=a8",
    "alloc as=s1 tokens=a8",
    "advance slot=s1 tokens=a8",
    "fork as=s2 slot=s1",
    "copy from=s1 to=s2",
    "insert prev=0 salt=s slot=s1 tokens=a8",
    "lock as=l salt=s tokens=a8",
    "unlock lock=l",
    "free slot=s1",
    "clone as=c id=r up_to=3",
    "truncate id=r up_to=3",
    "land id=r tier=decode",
    "settle",
    "fail from=disk rank=1 tier=host",
    "load id=r",
};

TEST(Operations, ofEveryVerbArePrintedAsTheyWereRead) {
  ASSERT_EQ(kFullLines.size(), kVerbCount);
  for (std::size_t i = 0; i < kVerbCount; ++i) {
    const Result<Operation> operation = operation_of(kFullLines[i]);
    ASSERT_TRUE(operation) << kFullLines[i] << ": " << operation.error().text;
    EXPECT_EQ(operation->verb, static_cast<Verb>(i));
    EXPECT_EQ(operation->text(), kFullLines[i]);
    EXPECT_TRUE(is_operation_verb(to_string(operation->verb)));
    EXPECT_EQ(capability_of(operation->verb) == Capability::tree, i >= 15 && i < 24)
        << kFullLines[i];
    EXPECT_EQ(capability_of(operation->verb) == Capability::sequences, i >= 24 && i < 26)
        << kFullLines[i];
    EXPECT_EQ(capability_of(operation->verb) == Capability::tiers, i >= 26 && i < 29)
        << kFullLines[i];
  }
  EXPECT_FALSE(is_operation_verb("request"));
  // Found by grammar_fuzz.cpp: no tokens were written as no field, which the verb needs.
  EXPECT_EQ(operation_of("match tokens=b0")->text(), "match tokens=[]");
}

TEST(Operations, needTheFieldsThatTheyNeed) {
  for (const std::string text :
       {"admit id=r",     "admit tokens=a1", "extend id=r",   "extend n=1",  "accept id=r",
        "checkpoint",     "finish",          "abort",         "preempt",     "complete",
        "capture id=r",   "restore id=r",    "compact",       "match",       "alloc",
        "advance slot=s", "fork slot=s",     "fork as=s",     "copy from=s", "copy to=s",
        "insert slot=s",  "lock tokens=a1",  "lock as=l",     "unlock",      "free",
        "clone id=r",     "clone as=r",      "truncate id=r", "land",        "fail"})
    EXPECT_NE(operation_of(text).error().text.find("needs the field"), std::string::npos) << text;
}

TEST(Operations, refuseWhatTheyDoNotUnderstand) {
  for (const std::string text :
       {"", "Admit id=r tokens=a1", "flush now=1", "check id=r", "extend id=r n=0",
        "extend id=r n=1 async=2", "finish id=r insert=yes", "step ids=r,,s",
        "step ids=", "compact mapping=", "compact mapping=-2", "evict kv=-1",
        "evict kv=", "evict kv=+1", "evict kv=1.5", "evict kv=0x10", "evict kv= 1",
        "checkpoint id=r up_to=-1", "evict kv=9223372036854775808"})
    EXPECT_FALSE(operation_of(text)) << text;
  EXPECT_EQ(operation_of("evict kv=9223372036854775807")->kv, INT64_MAX);
  EXPECT_EQ(operation_of("extend id=r n=0 async=1")->n, 0);  // a load
}

// Fields may stand in any order, and any subset of the optional ones; the text is sorted.
RC_GTEST_PROP(Operations, anyOrderAndSubsetOfFieldsSurvivesPrinting, ()) {
  const std::string full = *rc::gen::elementOf(kFullLines);
  const Line line = *parse_line(full);
  std::vector<std::pair<std::string_view, std::string_view>> fields = line.fields;
  for (std::size_t i = fields.size(); i > 1; --i)
    std::swap(fields[i - 1], fields[*rc::gen::inRange<std::size_t>(0, i)]);
  const auto drop = *rc::gen::inRange<std::size_t>(0, fields.size() + 1);
  if (drop < fields.size()) fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(drop));
  std::string shuffled(line.verb);
  for (const auto& [key, value] : fields)
    shuffled.append(" ").append(key).append("=").append(value);
  const Result<Operation> operation = operation_of(shuffled);
  if (!operation) {
    RC_ASSERT(operation.error().text.find("needs the field") != std::string::npos);
    return;
  }
  const std::string text = operation->text();
  std::ranges::sort(fields);
  std::string sorted(line.verb);
  for (const auto& [key, value] : fields) sorted.append(" ").append(key).append("=").append(value);
  RC_ASSERT(text == sorted);
  RC_ASSERT(operation_of(text)->text() == text);
}

TEST(Operations, textsForPeopleCutLongTokenLists) {
  const Result<Operation> operation =
      operation_of("admit id=r tokens=[1000001,1000002,1000003,1000004,1000005,1000006]");
  EXPECT_NE(operation->text(30).find("(6 tokens)"), std::string::npos) << operation->text(30);
  EXPECT_EQ(operation->text(30).find("admit id=r tokens=[1000001"), 0u);
}

// --- Replies -------------------------------------------------------------------------------------

/// Any fields; with a verb, those that its answers have, and all that they must have.
Reply random_reply(std::optional<Verb> verb = std::nullopt) {
  if (*rc::gen::inRange(0, 5) == 0)
    return Reply::refusal(static_cast<Refusal>(*rc::gen::inRange(1, 7)));
  Reply reply;
  std::size_t count = 0;
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    const bool is_due = verb && (field == ReplyField::cached || field == ReplyField::n ||
                                 field == ReplyField::kv || field == ReplyField::exist);
    if (verb && !may_answer(*verb, field)) continue;
    if (count == Reply::kMostFields || (!is_due && *rc::gen::inRange(0, 3) != 0)) continue;
    ++count;
    reply.set(field, field == ReplyField::finish
                         ? *rc::gen::inRange(0, 5)
                         : *rc::gen::element<std::int64_t>(0, 1, 63, 1 << 24, INT64_MAX));
  }
  return reply;
}

RC_GTEST_PROP(Replies, arePrintedAsTheyAreRead, ()) {
  const auto verb = static_cast<Verb>(*rc::gen::inRange<int>(0, kVerbCount));
  const Reply reply = random_reply(verb);
  const Result<Reply> again = parse_reply(reply.text(), verb);
  RC_ASSERT(again.has_value());
  RC_ASSERT(*again == reply);
  Digest one, other;
  reply.add_to(one);
  again->add_to(other);
  RC_ASSERT(one.value == other.value);
}

// Only fields that both carry are compared: a server behind a pipe knows less than an oracle.
RC_GTEST_PROP(Replies, differWhereAFieldOfBothDiffers, ()) {
  const Reply a = random_reply(), b = random_reply();
  bool differ = a.refused != b.refused;
  for (std::size_t i = 0; i < kReplyFieldCount && !differ; ++i) {
    const auto field = static_cast<ReplyField>(i);
    differ = a.has(field) && b.has(field) && a.get(field) != b.get(field);
  }
  RC_ASSERT(a.difference(b).has_value() == differ);
  RC_ASSERT(b.difference(a).has_value() == differ);
  RC_ASSERT(!a.difference(a));
  if (!differ) return;
  RC_ASSERT(a.difference(b)->field == b.difference(a)->field);
  RC_ASSERT(a.difference(b)->here == b.difference(a)->there);
  Digest one, other;
  a.add_to(one);
  b.add_to(other);
  RC_ASSERT(one.value != other.value);
}

TEST(Replies, nameTheFirstDifference) {
  Reply here, there;
  here.set(ReplyField::cached, 8).set(ReplyField::state, 8).set(ReplyField::conv, 1);
  there.set(ReplyField::cached, 8).set(ReplyField::state, 4);
  const auto difference = here.difference(there);
  ASSERT_TRUE(difference);
  EXPECT_EQ(difference->field + " " + difference->here + " " + difference->there, "state 8 4");
  const auto refused = here.difference(Reply::refusal(Refusal::no_kv));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->field + " " + refused->there, "refused no_kv");
  EXPECT_NE(here, there);
  EXPECT_EQ(here.text(), "cached=8 conv=1 state=8");
  EXPECT_EQ(Reply().text(), "ok");
  EXPECT_EQ(Reply().set(ReplyField::finish, 1).text(), "finish=stop");
}

// A child may answer with every field there is: that is an error of its own, not an exception.
TEST(Replies, withMoreFieldsThanAnyAnswerHasAreRefused) {
  std::string all;
  for (std::size_t i = 0; i < kReplyFieldCount; ++i)
    if (const auto field = static_cast<ReplyField>(i); field != ReplyField::finish)
      all += std::string(to_string(field)) + "=1 ";
  EXPECT_FALSE(parse_reply(all, Verb::admit));
}

TEST(Replies, needWhatTheirVerbPromises) {
  EXPECT_TRUE(parse_reply("cached=0", Verb::admit));
  EXPECT_TRUE(parse_reply("cached=0 x_speed=fast", Verb::admit)) << "fields of its own";
  EXPECT_FALSE(parse_reply("cached=0 speed=fast", Verb::admit)) << "it may be a misspelt one";
  EXPECT_FALSE(parse_reply("cached=0 kv_free=4", Verb::admit)) << "a field of another verb";
  EXPECT_TRUE(parse_reply("refused=no_row", Verb::admit));
  // Found by protocol_fuzz.cpp: numbers beside a refusal were kept and never printed.
  EXPECT_EQ(*parse_reply("slot=128 refused=no_kv", Verb::alloc), Reply::refusal(Refusal::no_kv));
  EXPECT_TRUE(parse_reply("ok", Verb::finish));
  for (const std::string text : {"ok", "", "kv=3", "cached=-1", "cached=", "cached", "cached=1e3",
                                 "cached=9223372036854775808", "refused=none", "refused=", "0",
                                 "cached=1 cached=1", "cached=1 finish=never"})
    EXPECT_FALSE(parse_reply(text, Verb::admit)) << text;
  EXPECT_FALSE(parse_reply("ok", Verb::extend));
  EXPECT_FALSE(parse_reply("ok", Verb::match));
  EXPECT_FALSE(parse_reply("ok", Verb::insert));
}

TEST(Replies, fieldsAreFoundByTheirNames) {
  for (std::size_t i = 0; i < kReplyFieldCount; ++i) {
    const auto field = static_cast<ReplyField>(i);
    EXPECT_EQ(reply_field_from(to_string(field)), field);
    for (std::size_t j = 0; j < i; ++j) {
      const auto other = static_cast<ReplyField>(j);
      const std::string text = Reply().set(field, 1).set(other, 1).text();
      EXPECT_TRUE(text.starts_with(std::min(to_string(field), to_string(other)))) << text;
    }
  }
  EXPECT_FALSE(reply_field_from("refused"));
}

// --- Config and time -----------------------------------------------------------------------------

TEST(ConfigFields, afterARoundTripAreTheSameConfig) {
  Config config;
  const Result<void> set = config.set_all(
      "policy=radix,kv_tokens=77,graph_batches=1,2,4,groups=attention:816,mamba:1648,step_time=7us,"
      "path_cap=3,strip_thinking=1,pool_bytes=9223372036854775807");
  ASSERT_TRUE(set) << set.error().text;
  EXPECT_EQ(config.policy, "radix");
  EXPECT_EQ(config.graph_batches, "1,2,4");
  EXPECT_EQ(config.text("groups"), "attention:816,mamba:1648");
  EXPECT_EQ(config.step_time, 7000);
  EXPECT_EQ(config.changed(),
            (std::vector<std::string>{"graph_batches", "groups", "kv_tokens", "path_cap", "policy",
                                      "pool_bytes", "step_time", "strip_thinking"}));
  Config one_by_one;
  std::string list;
  for (const auto& [field, value] : config.fields()) {
    EXPECT_TRUE(one_by_one.set(field, value)) << field << "=" << value;
    list.append(list.empty() ? "" : ",").append(field).append("=").append(value);
  }
  EXPECT_EQ(one_by_one, config);
  Config at_once;
  EXPECT_TRUE(at_once.set_all(list)) << list;
  EXPECT_EQ(at_once, config);
  EXPECT_TRUE(Config().changed().empty());
  const auto fields = config.fields();
  for (const auto& [name, value] : fields) EXPECT_EQ(config_field_from(name), name);
  EXPECT_EQ(config_field_from("nowhere"), std::nullopt);
  EXPECT_EQ(fields.back().first, "write_policy");
  EXPECT_TRUE(std::ranges::is_sorted(fields));
}

TEST(ConfigFields, areHeldToTheirRanges) {
  for (const std::string list : {"kv_tokens=0",
                                 "kv_tokens=1073741825",
                                 "page=0",
                                 "chunked_prefill=0",
                                 "max_running=0",
                                 "state_slots=-1",
                                 "overlap=2",
                                 "path_cap=-2",
                                 "step_time=0ms",
                                 "step_time=5",
                                 "kv_tokens",
                                 "=5",
                                 "kv_tokens=5,,page=1",
                                 "kv_tokens=5,page",
                                 ",kv_tokens=5",
                                 "policy=a b",
                                 "ranks=0",
                                 "unknown=1",
                                 "kv_tokens=5,kv_tokens2=6",
                                 "kv_tokens=5,kv_tokens=6",
                                 "kv_tokens=1,2"})
    EXPECT_FALSE(Config().set_all(list)) << list;
  EXPECT_TRUE(Config().set_all("")) << "no change";
  EXPECT_TRUE(Config().set_all("policy="));
  EXPECT_EQ(Config().set("kv_tokens", "x").error().text.find("field kv_tokens: `x`"), 0u);
}

TEST(ConfigFields, rowsFollowTheRequestsThatRun) {
  Config config;
  EXPECT_EQ(config.rows(), config.max_running);
  config.request_rows = 7;
  EXPECT_EQ(config.rows(), 7);
}

TEST(Times, areReadAndPrintedInAnyUnit) {
  EXPECT_EQ(parse_time("0ns").value(), 0);
  EXPECT_EQ(parse_time("5ms").value(), 5'000'000);
  EXPECT_EQ(parse_time("9223372036s").value(), 9'223'372'036'000'000'000);
  EXPECT_EQ(time_text(1'500'000), "1500us");
  for (const std::string text : {"", "5", "ms", "-5ms", "5 ms", "5m", "1.5s", "5msx", "9223372037s",
                                 "+5ms", "0x5ms", "9223372036854775808ns", "5MS", "5sec"})
    EXPECT_FALSE(parse_time(text)) << text;
}

RC_GTEST_PROP(Times, printedAreReadAsTheSame, ()) {
  const auto time = *rc::gen::inRange<Nanoseconds>(0, INT64_MAX) /
                    *rc::gen::element<Nanoseconds>(1, 999, 1'000'000, 1'000'000'000'000);
  RC_ASSERT(parse_time(time_text(time)).value() == time);
  const Nanoseconds whole = time / 1'000'000'000 * 1'000'000'000;
  RC_ASSERT(parse_time(time_text(whole)).value() == whole);
  RC_ASSERT(whole == 0 || time_text(whole).back() == 's');
}

TEST(Integers, sayWhatIsWrongWithThem) {
  EXPECT_EQ(parse_integer("-9223372036854775808", INT64_MIN, INT64_MAX).value(), INT64_MIN);
  EXPECT_EQ(parse_integer("8", 9, 10).error().text, "8 is below 9");
  EXPECT_EQ(parse_integer("11", 9, 10).error().text, "11 is above 10");
  EXPECT_NE(parse_integer("18446744073709551616", 0, INT64_MAX).error().text.find("64 bits"),
            std::string::npos);
  for (const std::string text : {"", "-", "+8", " 8", "8 ", "8,", "0x8", "1e3", "٨"})
    EXPECT_FALSE(parse_integer(text, INT64_MIN, INT64_MAX)) << text;
}

}  // namespace
}  // namespace lockstep
