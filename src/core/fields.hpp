// Problems as one line of text: the operation's name, then `key=value` words. A table of fields, in the order of the
// text, prints and reads them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/text.hpp"
#include "rapt/types.hpp"

namespace rapt {

// A word of the text: "sq=512", or the flag "causal".
struct Word {
  std::string_view text, key, value;
  bool has_value;

  [[noreturn]] void refuse(const std::string& wanted) const;
  std::int64_t integer(const char* wanted = "a number after =") const;
  float number() const;
  DType dtype() const;  // f32, bf16 or f16, or one of those that caches have
};

template <class P>
struct Field {
  std::string_view key;
  bool is_flag;
  // Appends " key=value" for a value that is not the default.
  void (*print)(const P&, std::string_view key, std::string& text);
  void (*read)(P&, const Word&);
};

inline void print_word(std::string& text, std::string_view key, std::string_view value) {
  text.append(" ").append(key).append("=").append(value);
}

// Fields that are what they say. `kDefault` is left out of the text.
template <class P, auto kMember, std::int64_t kDefault>
constexpr Field<P> integer_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.*kMember != kDefault) print_word(text, name, std::to_string(p.*kMember));
          },
          [](P& p, const Word& word) { p.*kMember = word.integer(); }};
}
// Always in the text.
template <class P, auto kMember>
constexpr Field<P> size_field(std::string_view key) {
  return {
      key, false,
      [](const P& p, std::string_view name, std::string& text) { print_word(text, name, std::to_string(p.*kMember)); },
      [](P& p, const Word& word) { p.*kMember = word.integer(); }};
}
// The same as another one unless it is given.
template <class P, auto kMember, auto kOther>
constexpr Field<P> size_field_like(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.*kMember != p.*kOther) print_word(text, name, std::to_string(p.*kMember));
          },
          [](P& p, const Word& word) { p.*kMember = word.integer(); }};
}
template <class P, auto kMember>
constexpr Field<P> flag_field(std::string_view key) {
  return {key, true,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.*kMember) text.append(" ").append(name);
          },
          [](P& p, const Word&) { p.*kMember = true; }};
}
// `kAlso` have this type, too, unless it is given.
template <class P, auto kMember, auto... kAlso>
constexpr Field<P> dtype_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.*kMember != DType::f32) print_word(text, name, to_string(p.*kMember));
          },
          [](P& p, const Word& word) {
            p.*kMember = word.dtype();
            ((p.*kAlso = p.*kMember), ...);
          }};
}
// The same as another one unless it is given.
template <class P, auto kMember, auto kOther>
constexpr Field<P> dtype_field_like(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.*kMember != p.*kOther) print_word(text, name, to_string(p.*kMember));
          },
          [](P& p, const Word& word) { p.*kMember = word.dtype(); }};
}
// The type of several members in one word, where they have the same; of one of them, where they do not.
template <class P, auto kFirst, auto... kOthers>
constexpr bool has_one_dtype(const P& p) {
  return ((p.*kFirst == p.*kOthers) && ...);
}
template <class P, auto kFirst, auto... kOthers>
constexpr Field<P> common_dtype_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (has_one_dtype<P, kFirst, kOthers...>(p) && p.*kFirst != DType::f32)
              print_word(text, name, to_string(p.*kFirst));
          },
          [](P& p, const Word& word) {
            p.*kFirst = word.dtype();
            ((p.*kOthers = p.*kFirst), ...);
          }};
}
template <class P, auto kMember, auto... kAll>
constexpr Field<P> own_dtype_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (!has_one_dtype<P, kAll...>(p) && p.*kMember != DType::f32)
              print_word(text, name, to_string(p.*kMember));
          },
          [](P& p, const Word& word) { p.*kMember = word.dtype(); }};
}
// The device, where the CPU is not written; number_field(): a number, where 0 stands for none and is not written.
template <class P>
constexpr Field<P> device_field() {
  return {"device", false,
          [](const P& p, std::string_view key, std::string& text) {
            if (p.device != DeviceType::cpu) print_word(text, key, to_string(p.device));
          },
          [](P& p, const Word& word) {
            if (word.value != "cpu" && word.value != "cuda") word.refuse("device=cpu or device=cuda");
            p.device = word.value == "cpu" ? DeviceType::cpu : DeviceType::cuda;
          }};
}
template <class P, auto kMember>
constexpr Field<P> number_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.*kMember != 0) print_word(text, name, shortest(p.*kMember));
          },
          [](P& p, const Word& word) {
            p.*kMember = word.number();
            if (p.*kMember == 0) word.refuse("a " + std::string(word.key) + " other than 0, or none");
          }};
}

// Scales per row of k and v: "groups" where both have as many, else "k_groups" and "v_groups".
template <class P>
constexpr Field<P> groups_field() {
  return {"groups", false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.k_groups == p.v_groups && p.k_groups != 0) print_word(text, name, std::to_string(p.k_groups));
          },
          [](P& p, const Word& word) { p.k_groups = p.v_groups = word.integer(); }};
}
template <class P, auto kMember>
constexpr Field<P> own_groups_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.k_groups != p.v_groups && p.*kMember != 0) print_word(text, name, std::to_string(p.*kMember));
          },
          [](P& p, const Word& word) { p.*kMember = word.integer(); }};
}

// The words behind the operation's name, each key once. Throws Error for another name.
class Words {
 public:
  Words(std::string_view text, std::string_view operation);
  bool has(std::string_view key) const;

  // Reads every word, in the order of the tables: a word for several fields stands before those that have their own.
  // Throws Error that names a word without a field.
  template <class P, class... Table>
  void read(P& p, const Table&... tables) const {
    for (const Word& word : words_) {
      bool known = false;
      const auto look = [&](const auto& field) { known = known || is_of(field, word); };
      (for_each(tables, look), ...);
      if (!known) refuse(word, tables...);
    }
    const auto read_field = [&](const auto& field) {
      for (const Word& word : words_)
        if (is_of(field, word)) field.read(p, word);
    };
    (for_each(tables, read_field), ...);
  }

 private:
  template <class Table, class F>
  static void for_each(const Table& table, const F& f) {
    for (const auto& field : table) f(field);
  }
  template <class F>
  static bool is_of(const F& field, const Word& word) {
    return field.key == word.key && field.is_flag != word.has_value;
  }
  template <class... Table>
  [[noreturn]] static void refuse(const Word& word, const Table&... tables) {
    std::string values, flags;
    const auto list = [&](const auto& field) { (field.is_flag ? flags : values).append(" ").append(field.key); };
    (for_each(tables, list), ...);
    word.refuse("one of" + values + ", each with =value, or" + (flags.empty() ? " nothing" : flags));
  }

  std::vector<Word> words_;
};

template <class P, class... Table>
std::string print_fields(std::string_view operation, const P& p, const Table&... tables) {
  std::string text(operation);
  const auto print_all = [&](const auto& table) {
    for (const auto& field : table) field.print(p, field.key, text);
  };
  (print_all(tables), ...);
  return text;
}

// Where query 0 sits among the keys.
template <class P>
constexpr Field<P> align_field(std::string_view key) {
  return {key, false,
          [](const P& p, std::string_view name, std::string& text) {
            if (p.align == P::Align::top_left) print_word(text, name, "top_left");
            if (p.align == P::Align::bottom_right) print_word(text, name, "bottom_right");
            if (p.align == P::Align::offset) print_word(text, name, std::to_string(p.align_offset));
          },
          [](P& p, const Word& word) {
            p.align_offset = 0;
            if (word.value == "top_left") p.align = P::Align::top_left;
            else if (word.value == "bottom_right") p.align = P::Align::bottom_right;
            else
              p.align = P::Align::offset, p.align_offset = word.integer("align=top_left, bottom_right or an integer");
          }};
}

}  // namespace rapt
