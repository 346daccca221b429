// The kernels against plain loops in double, in one program: for CPUs that this machine is not, run by an emulator.
//
// Every kernel is given numbers that its type holds exactly; its answer must be as near as its rounding, and a row the
// same bits alone, in a crowd, and on any number of threads. Prints what is wrong; exit code 0 if nothing is.

#include "../../../engine/compute/native/kernels.cpp"

#include <cstdio>
#include <random>

namespace {

constexpr double ROUNDING = SLIP_ELEMENT == SLIP_BFLOAT16 ? 1. / 256 : SLIP_ELEMENT == SLIP_FLOAT16 ? 1. / 2048 : 1e-5;

int failures = 0;

void check(bool is_right, const char* what, Index a = 0, Index b = 0) {
  if (is_right) return;
  failures++;
  std::printf("wrong: %s (%ld, %ld)\n", what, (long)a, (long)b);
}

std::mt19937 generator(7);

std::vector<Element> noise(Index count, float size = 1.f) {
  std::normal_distribution<float> normal(0, size);
  std::vector<Element> numbers(count);
  for (auto& number : numbers) number = nearest(normal(generator));
  return numbers;
}

bool is_near(double found, double expected, double size, double slack = 4) {
  return std::abs(found - expected) <= slack * ROUNDING * (std::abs(expected) + size);
}

bool is_same(const Element* a, const Element* b, Index count) { return memcmp(a, b, count * sizeof(Element)) == 0; }

void check_products(Index k, Index out) {
  const auto weight = noise(out * k), bias = noise(out), x = noise(97 * k, 1.f / std::sqrt((float)k));
  std::vector<Element> packed(out * k), whole(97 * out), few(97 * out);
  Team one(1), three(3);
  slip_pack(&three, weight.data(), packed.data(), out, k);
  const Product product{ELEMENTS, packed.data(), bias.data(), out, k};
  slip_linear(&one, &product, x.data(), whole.data(), 97);
  for (Index i = 0; i < 97; i++)
    for (Index o = 0; o < out; o++) {
      double expected = value(bias[o]);
      for (Index j = 0; j < k; j++) expected += (double)value(x[i * k + j]) * value(weight[o * k + j]);
      check(is_near(value(whole[i * out + o]), expected, 1), "product", i, o);
    }
  for (Index n : {1, 5, 6, 7, 8, 9, 95}) {
    slip_linear(n % 2 ? &three : &one, &product, x.data() + 2 * k, few.data(), n);
    check(is_same(few.data(), whole.data() + 2 * out, n * out), "product in other company", n);
  }
}

// Experts of which one gets no row, one more than a block of rows, and one number is nobody's.
void check_experts() {
  const Index count = 4, hidden = 64, width = 32, n = 130, each = 2;
  const auto gate_up = noise(count * 2 * width * hidden, 1.f / 8), down = noise(count * hidden * width, 1.f / 4);
  const auto x = noise(n * hidden);
  std::vector<Element> packed(gate_up.size()), packed_down(down.size()), scratch(n * each * (hidden + width));
  std::vector<Element> whole(n * hidden), few(n * hidden);
  std::vector<Index> chosen(n * each);
  std::vector<float> shares(n * each);
  for (Index i = 0; i < n; i++) {
    chosen[2 * i] = i % 10 ? 3 : 0, chosen[2 * i + 1] = i % 7 ? 1 : count;
    shares[2 * i] = .75f, shares[2 * i + 1] = .25f;
  }
  Team one(1), three(3);
  slip_pack(&three, gate_up.data(), packed.data(), count * 2 * width, hidden);
  slip_pack(&three, down.data(), packed_down.data(), count * hidden, width);
  const Experts experts{{ELEMENTS, packed.data(), nullptr, count * 2 * width, hidden},
                        {ELEMENTS, packed_down.data(), nullptr, count * hidden, width}, count, SILU};
  const auto compute = [&](Team& team, Index first, Index rows, Element* y) {
    const ChosenExperts c{x.data() + first * hidden, chosen.data() + first * each, shares.data() + first * each, y,
                          scratch.data(), rows, each};
    slip_experts(&team, &experts, &c);
  };
  compute(one, 0, n, whole.data());
  for (Index i = 0; i < n; i++) {
    std::vector<double> expected(hidden);
    for (Index c = 0; c < each; c++) {
      const Index e = chosen[each * i + c];
      if (e == count) continue;
      std::vector<double> both(2 * width);
      for (Index o = 0; o < 2 * width; o++)
        for (Index j = 0; j < hidden; j++)
          both[o] += (double)value(x[i * hidden + j]) * value(gate_up[(e * 2 * width + o) * hidden + j]);
      for (Index o = 0; o < hidden; o++)
        for (Index j = 0; j < width; j++)
          expected[o] += shares[each * i + c] * both[j] / (1 + std::exp(-both[j])) * both[width + j] *
                         value(down[(e * hidden + o) * width + j]);
    }
    for (Index o = 0; o < hidden; o++) check(is_near(value(whole[i * hidden + o]), expected[o], 1), "experts", i, o);
  }
  for (Index rows : {1, 2, 9, 97}) {
    compute(rows % 2 ? three : one, 5, rows, few.data());
    check(is_same(few.data(), whole.data() + 5 * hidden, rows * hidden), "experts in other company", rows);
  }
}

// A mixture of the likeliest two of six experts and a shared one: rows are what its parts make of them, and the same
// bits in other company.
void check_mixture() {
  const Index count = 6, hidden = 64, width = 32, wide = 96, n = 130, each = 2;
  const auto routes = noise(PANEL * hidden, 1.f / 8), gate_up = noise(count * 2 * width * hidden, 1.f / 8);
  const auto down = noise(count * hidden * width, 1.f / 4), shared_up = noise(2 * wide * hidden, 1.f / 8);
  const auto shared_down = noise(hidden * wide, 1.f / 8), gate = noise(hidden, 1.f / 8), x = noise(n * hidden);
  Team one(1), three(3);
  std::vector<std::vector<Element>> kept;
  const auto packed = [&](const std::vector<Element>& weight, Index k) {
    const Index out = (Index)weight.size() / k;
    kept.emplace_back(weight.size());
    slip_pack(&three, weight.data(), kept.back().data(), out, k);
    return Product{ELEMENTS, kept.back().data(), nullptr, out, k};
  };
  const Router router{packed(routes, hidden), count, each, true, true};
  const Mixture m{router, {packed(gate_up, hidden), packed(down, width), count, SILU}, packed(shared_up, hidden),
                  packed(shared_down, wide), gate.data(), SILU};
  std::vector<Element> logits(n * PANEL), mixed(n * hidden), act(n * wide), shared(n * hidden), whole(n * hidden);
  std::vector<Element> few(n * hidden), scratch(n * std::max(slip_mixture_scratch(&m), each * (hidden + width)));
  std::vector<Index> chosen(n * each);
  std::vector<float> shares(n * each);
  const Routes to{x.data(), logits.data(), chosen.data(), shares.data(), n};
  slip_route(&one, &router, &to);
  const ChosenExperts c{x.data(), chosen.data(), shares.data(), mixed.data(), scratch.data(), n, each};
  slip_experts(&one, &m.experts, &c);
  one.run(true, [&](Worker& me) { gated_product_in_team(me, m.shared_gate_up, {SILU, true}, x.data(), act.data(), n, nullptr); });
  slip_linear(&one, &m.shared_down, act.data(), shared.data(), n);
  slip_mixture(&one, &m, x.data(), whole.data(), scratch.data(), n);
  for (Index i = 0; i < n; i++) {
    for (Index choice = 0; choice < each; choice++)
      for (Index e = 0, taken = chosen[each * i]; e < count; e++)
        check((choice && e == taken) || value(logits[i * PANEL + e]) <= value(logits[i * PANEL + chosen[each * i + choice]]),
              "choice", i, e);
    check(std::abs(shares[each * i] + shares[each * i + 1] - 1) <= 2 * ROUNDING, "shares", i);
    double open = 0;
    for (Index j = 0; j < hidden; j++) open += (double)value(x[i * hidden + j]) * value(gate[j]);
    for (Index j = i * hidden; j < (i + 1) * hidden; j++)
      check(is_near(value(whole[j]), value(mixed[j]) + value(shared[j]) / (1 + std::exp(-open)), 1), "mixture", i, j);
  }
  for (Index rows : {1, 8, 9, 97}) {
    slip_mixture(rows % 2 ? &three : &one, &m, x.data() + 5 * hidden, few.data(), scratch.data(), rows);
    check(is_same(few.data(), whole.data() + 5 * hidden, rows * hidden), "mixture in other company", rows);
  }
}

// Weights rounded to few bits: each as near as half a step of its 32.
void check_quantized(Format format, double step) {
  const Index k = 96, out = 64;
  const auto weight = noise(out * k);
  std::vector<Element> packed(out * k), read(out * k);
  std::vector<uint8_t> panels(2 * slip_panel_bytes(format, k));
  std::vector<Index> order(out);
  for (Index o = 0; o < out; o++) order[o] = o;
  Team three(3);
  slip_pack(&three, weight.data(), packed.data(), out, k);
  slip_quantize(&three, format, packed.data(), panels.data(), out, k);
  const FormatPanel table[2] = {{format, panels.data()}, {format, panels.data() + slip_panel_bytes(format, k)}};
  const Product product{BLOCKS, table, nullptr, out, k};
  slip_read_rows(&three, &product, order.data(), read.data(), out);
  for (Index i = 0; i < out * k; i += BLOCK) {
    double wrong = 0, largest = 0;
    for (Index j = i; j < i + BLOCK; j++) {
      wrong = std::max<double>(wrong, std::abs(value(read[j]) - value(weight[j])));
      largest = std::max<double>(largest, std::abs(value(weight[j])));
    }
    check(wrong <= (step + ROUNDING) * largest, "rounded weight", i / k, i % k);
  }
}

// Rows as blocks times weights of a GGUF format, whose bytes are random but for their scales.
template <class F>
void check_blocks(Format format, std::vector<Index> halves) {
  const Index k = 512, out = 40, spans = k / F::SPAN, row_bytes = spans * F::STORED;
  std::vector<uint8_t> stored(out * row_bytes), panels(2 * slip_panel_bytes(format, k));
  for (auto& byte : stored) byte = (uint8_t)generator();
  for (Index span = 0; F::HAS_EXPONENTS && span < out * spans; span++) stored[span * F::STORED] = 118 + generator() % 3;
  for (Index span = 0; span < out * spans; span++)
    for (Index at : halves) {  // 0.001 to 0.008
      const uint16_t half = (uint16_t)(0x1400 + generator() % 0xC00 + (generator() % 2 << 15));
      memcpy(stored.data() + span * F::STORED + at, &half, 2);
    }
  Team three(3);
  slip_pack_blocks(&three, format, stored.data(), nullptr, panels.data(), out, k);
  const FormatPanel table[2] = {{format, panels.data()}, {format, panels.data() + slip_panel_bytes(format, k)}};
  const Product product{BLOCKS, table, nullptr, out, k};
  const auto half_value = [](uint16_t half) {
    return std::ldexp((half & 1023) + (half >> 10 & 31 ? 1024. : 0.), std::max(1, half >> 10 & 31) - 25) * (half >> 15 ? -1 : 1);
  };
  std::vector<double> exact(out * k);
  for (Index i = 0; i < out * k; i++) {
    StoredSpan span{};
    F::read(stored.data() + i / F::SPAN * F::STORED, span);
    const Index within = i % F::SPAN, number = within / F::PER_SCALE;
    const int code = span.codes[within], middle = F::IS_CENTRED ? 1 << (F::LOW + F::HIGH - 1) : 0;
    exact[i] = (F::HAS_EXPONENTS ? std::ldexp(1., span.scale - 128) : half_value(span.scale)) * (F::HAS_BYTES ? span.scales[number] : 1) *
               (F::IS_LISTED ? F::LISTED.of[code] : code - middle);
    if (F::HAS_LEAST) exact[i] += half_value(span.least) * (F::HAS_BYTES ? -span.leasts[number] : 1);
  }
  const auto x = noise(40 * k, 1.f / std::sqrt((float)k));
  std::vector<RowBlock> rows(40 * row_blocks(k));
  for (Index i = 0; i < 40; i++) {
    const Element* row = x.data() + i * k;
    put_row(row, k, rows.data() + i * row_blocks(k));
    const auto is_less = [](Element a, Element b) { return std::abs(value(a)) < std::abs(value(b)); };
    const uint32_t largest = (uint32_t)(std::max_element(row, row + k, is_less) - row);  // the first of equals
    check(rows[i * row_blocks(k) + k / BLOCK].four == largest / 4, "a row's peak", i);
  }
  std::vector<Element> whole(40 * out), few(40 * out), read(out * k);
  slip_linear(&three, &product, x.data(), whole.data(), 40);
  for (Index i = 0; i < 40; i++)
    for (Index o = 0; o < out; o++) {
      double expected = 0, size = 0;
      for (Index j = 0; j < k; j++) {
        const RowBlock *row = rows.data() + i * row_blocks(k), &block = row[j / BLOCK], &peak = row[k / BLOCK];
        const double number = j / 4 == peak.four ? (double)peak.scale * peak.codes[j % BLOCK] : (double)block.scale * block.codes[j % BLOCK];
        const double term = number * exact[o * k + j];
        expected += term, size += std::abs(term);
      }
      check(std::abs(value(whole[i * out + o]) - expected) <= ROUNDING * std::abs(expected) + 1e-5 * size, "blocks", i, o);
    }
  std::vector<Index> order(out);
  for (Index o = 0; o < out; o++) order[o] = o;
  slip_read_rows(&three, &product, order.data(), read.data(), out);
  for (Index i = 0; i < out * k; i++) check(is_near(value(read[i]), exact[i], 0, 2), "stored weight", i / k, i % k);
  for (Index n : {1, 2, 3, 7}) {
    slip_linear(&three, &product, x.data() + 2 * k, few.data(), n);
    check(is_same(few.data(), whole.data() + 2 * out, n * out), "blocks in other company", n);
  }
}

// Floats of 8 bits, all but NaN, with a scale for each 128 inputs, of which the last are fewer.
void check_floats() {
  const Index k = 418, out = 40, spans = 4;
  std::vector<uint8_t> codes(out * k), panels(2 * slip_panel_bytes(F8_E4M3, k));
  std::vector<float> scales(out * spans);
  for (auto& code : codes) code = (uint8_t)(generator() % 127 | (generator() % 2) << 7);
  for (auto& scale : scales) scale = 1e-4f * (float)(1 + generator() % 50);
  std::vector<double> exact(out * k);
  for (Index i = 0; i < out * k; i++) {
    const int code = codes[i], exponent = code >> 3 & 15, fraction = code & 7;
    const double size = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    exact[i] = (code >> 7 ? -size : size) * scales[i / k * spans + i % k / 128];
  }
  Team three(3);
  slip_pack_floats(&three, codes.data(), scales.data(), panels.data(), out, k);
  const FormatPanel table[2] = {{F8_E4M3, panels.data()}, {F8_E4M3, panels.data() + slip_panel_bytes(F8_E4M3, k)}};
  const Product product{NUMBERS, table, nullptr, out, k};
  const auto x = noise(40 * k, 1.f / std::sqrt((float)k));
  std::vector<Element> whole(40 * out), few(40 * out);
  slip_linear(&three, &product, x.data(), whole.data(), 40);
  for (Index i = 0; i < 40; i++)
    for (Index o = 0; o < out; o++) {
      double expected = 0, size = 0;
      for (Index j = 0; j < k; j++) {
        const double term = (double)value(x[i * k + j]) * exact[o * k + j];
        expected += term, size += std::abs(term);
      }
      check(std::abs(value(whole[i * out + o]) - expected) <= ROUNDING * std::abs(expected) + 1e-5 * size, "floats", i, o);
    }
  for (Index n : {1, 2, 3, 7, 33}) {
    slip_linear(&three, &product, x.data() + 2 * k, few.data(), n);
    check(is_same(few.data(), whole.data() + 2 * out, n * out), "floats in other company", n);
  }
}

void check_all_blocks() {
  check_blocks<OfQ4_0>(Q4_0, {0});
  check_blocks<OfQ4_1>(Q4_1, {0, 2});
  check_blocks<OfQ5_0>(Q5_0, {0});
  check_blocks<OfQ5_1>(Q5_1, {0, 2});
  check_blocks<OfQ8_0>(Q8_0, {0});
  check_blocks<OfQ2_K>(Q2_K, {80, 82});
  check_blocks<OfQ3_K>(Q3_K, {108});
  check_blocks<OfQ4_K>(Q4_K, {0, 2});
  check_blocks<OfQ5_K>(Q5_K, {0, 2});
  check_blocks<OfQ6_K>(Q6_K, {208});
  check_blocks<OfIQ4_NL>(IQ4_NL, {0});
  check_blocks<OfIQ4_XS>(IQ4_XS, {0});
  check_blocks<OfMXFP4>(MXFP4, {});
}

void check_rows() {
  const Index n = 37, width = 96;
  const auto x = noise(n * 2 * width, 3.f), weight = noise(width);
  std::vector<Element> y(n * width);
  Team team(3);
  const Norm norm{weight.data(), 1e-5f};
  slip_normalize(&team, x.data(), &norm, y.data(), n, width);
  for (Index i = 0; i < n; i++) {
    double squares = 0;
    for (Index j = 0; j < width; j++) squares += (double)value(x[i * width + j]) * value(x[i * width + j]);
    for (Index j = 0; j < width; j++)
      check(is_near(value(y[i * width + j]),
                    value(x[i * width + j]) / std::sqrt(squares / width + 1e-5) * value(weight[j]), 0.1), "norm", i, j);
  }
  slip_activate(&team, x.data(), y.data(), n, width, SILU, true);
  for (Index i = 0; i < n; i++)
    for (Index j = 0; j < width; j++) {
      const double gate = value(x[i * 2 * width + j]), up = value(x[(i * 2 + 1) * width + j]);
      check(is_near(value(y[i * width + j]), gate / (1 + std::exp(-gate)) * up, 0.1), "gate", i, j);
    }
}

// Two sequences in pages: `count` tokens at the end of `length` positions each.
void check_attention(Index dim, Index length, Index count, Index window, float softcap) {
  const Index kv_heads = 2, heads = 6, block_size = 7, sequences = 2, blocks = (length + block_size - 1) / block_size;
  const auto query = noise(sequences * count * heads * dim);
  const auto keys = noise(sequences * blocks * kv_heads * block_size * dim);
  const auto values = noise(sequences * blocks * kv_heads * block_size * dim);
  std::vector<int32_t> counts(sequences, count), lengths(sequences, length), tables(sequences * blocks);
  for (Index i = 0; i < sequences * blocks; i++) tables[i] = (int32_t)(sequences * blocks - 1 - i);
  std::vector<Element> output(query.size()), alone(query.size());
  Attention a{query.data(), keys.data(), values.data(), counts.data(), lengths.data(), tables.data(), nullptr, nullptr,
              output.data(), nullptr, nullptr, sequences, blocks, heads, kv_heads, dim, block_size, window, 0, 0, 0, 0.3f,
              softcap};
  Team one(1), three(3);
  slip_attend(&three, &a);
  a.output = alone.data();
  slip_attend(&one, &a);
  check(is_same(output.data(), alone.data(), output.size()), "attention on other threads", dim, length);
  for (Index row = 0; row < sequences * count * heads; row++) {
    const Index head = row % heads, token = row / heads % count, sequence = row / heads / count;
    const Index last = length - count + token, first = window ? std::max<Index>(0, last + 1 - window) : 0;
    std::vector<double> weights(last + 1), sums(dim);
    double total = 0;
    const auto at = [&](Index p) {
      const Index block = tables[sequence * blocks + p / block_size];
      return ((block * kv_heads + head / (heads / kv_heads)) * block_size + p % block_size) * dim;
    };
    for (Index p = first; p <= last; p++) {
      double score = 0;
      for (Index d = 0; d < dim; d++) score += (double)value(query[row * dim + d]) * value(keys[at(p) + d]);
      score *= 0.3;
      if (softcap > 0) score = softcap * std::tanh(score / softcap);
      total += weights[p] = std::exp(score);
    }
    for (Index d = 0; d < dim; d++) {
      double expected = 0;
      for (Index p = first; p <= last; p++) expected += weights[p] / total * value(values[at(p) + d]);
      check(is_near(value(output[row * dim + d]), expected, 1), "attention", row, d);
    }
  }
}

void check_rotation() {
  const Index n = 5, heads = 3, kv_heads = 1, dim = 32, block_size = 4;
  auto qkv = noise(n * (heads + 2 * kv_heads) * dim);
  std::vector<float> cos(n * dim), sin(n * dim);
  for (Index i = 0; i < n * dim; i++) cos[i] = std::cos(i), sin[i] = std::sin(i);
  std::vector<Element> query(n * heads * dim), keys(2 * block_size * dim), values(keys.size());
  const Index slots[n] = {7, 0, 3, 4, 6};
  const Rotation r{{heads, kv_heads, dim, dim}, qkv.data(), cos.data(), sin.data(), {}, {}, query.data(), keys.data(),
                   values.data(), slots, n, block_size};
  Team team(2);
  slip_rotate_and_write(&team, &r);
  for (Index i = 0; i < n; i++)
    for (Index head = 0; head < heads + kv_heads; head++)
      for (Index d = 0; d < dim; d++) {
        const Element* from = qkv.data() + (i * (heads + 2 * kv_heads) + head) * dim;
        const double other = d < dim / 2 ? -value(from[d + dim / 2]) : value(from[d - dim / 2]);
        const double expected = (double)value(from[d]) * cos[i * dim + d] + other * sin[i * dim + d];
        const Element found = head < heads ? query[(i * heads + head) * dim + d] : keys[slots[i] * dim + d];
        check(is_near(value(found), expected, 1), "rotation", head, d);
      }
}

void check_draws() {
  const Index n = 24, vocab = 3000;
  std::vector<float> logits(n * vocab), temperature(n, 1.f);
  std::normal_distribution<float> normal(0, 3);
  for (auto& logit : logits) logit = normal(generator);
  std::vector<Index> rows(n), found(n), best(n);
  std::vector<int32_t> top_k(n, 0), keys(2 * n);
  std::vector<double> top_p(n, 1.), log_min_p(n, -INFINITY);
  for (Index i = 0; i < n; i++) rows[i] = i, keys[2 * i] = (int32_t)generator(), keys[2 * i + 1] = (int32_t)generator();
  for (Index i = 0; i < n / 2; i++) top_k[i] = 1 + (int32_t)i;
  const Draw d{logits.data(), rows.data(), temperature.data(), top_k.data(), top_p.data(), log_min_p.data(), keys.data(),
               found.data(), n, vocab, 0};
  Team team(3);
  slip_draw(&team, &d);
  slip_best(&team, logits.data(), 0, n, vocab, best.data());
  for (Index i = 0; i < n; i++) {
    const float* row = logits.data() + i * vocab;
    std::vector<Index> order(vocab);
    for (Index j = 0; j < vocab; j++) order[j] = j;
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return row[a] > row[b]; });
    check(best[i] == order[0], "best", i);
    order.resize(top_k[i] ? top_k[i] : vocab);
    const auto score = [&](Index token) { return (double)(row[token] - row[best[i]]) + gumbel((int32_t)token, &keys[2 * i]); };
    const Index expected = *std::max_element(order.begin(), order.end(), [&](Index a, Index b) { return score(a) < score(b); });
    check(found[i] == expected, "draw", found[i], expected);
  }
}

}  // namespace

int main() {
  check_products(2, 32);
  check_products(34, 64);
  check_products(130, 96);
  check_experts();
  check_mixture();
  check_quantized(Q8_0, 0.51 / 127);
  check_quantized(Q4_1, 2. / 15);
  check_all_blocks();
  check_floats();
  check_rows();
  check_rotation();
  for (Index dim : {32, 96}) {
    check_attention(dim, 1, 1, 0, 0);
    check_attention(dim, 70, 3, 0, 0);
    check_attention(dim, 70, 70, 20, 0);
    check_attention(dim, 1100, 2, 0, 4.f);
  }
  check_draws();
  std::printf(failures ? "%d answers are wrong\n" : "all answers are right\n", failures);
  return failures != 0;
}
