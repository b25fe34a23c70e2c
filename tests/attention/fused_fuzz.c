/* Random calls of the kernel in src/locant/attention/fused.c, to be built with a sanitizer.

   Every tensor is a block of exactly its own size, with random strides, and outputs are uninitialised memory. Results are
   compared with loops over pairs in double precision, and the kind of each tile with its definition.

     cc -fsanitize=address,undefined -DFUSED='"…/fused.c"' fused_fuzz.c -o fuzz -lm -lpthread
     ./fuzz SEED CALLS [CALLERS]

   With CALLERS, each call is then repeated by that many threads at once, on the same inputs: all must get its bits. A
   call depends on its own seed alone: SEED, SEED + 1, … */

#include FUSED
#include <pthread.h>
#include <stdio.h>

#ifdef __clang__
#define NOT_CHECKED __attribute__((no_sanitize("address", "undefined", "thread")))
#else
#define NOT_CHECKED __attribute__((no_sanitize("address,undefined,thread"))) /* the loops in double: 3 times faster */
#endif

/* ---------------------------------------------------------------- random numbers */

static uint64_t state;
static uint32_t random_bits(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33);
}
static Int between(Int a, Int b) { return a + random_bits() % (b - a + 1); }
static int one_in(Int n) { return random_bits() % n == 0; }
static float random_real(void) { return (float)random_bits() / 1073741824.0f - 1; }
#define ONE_OF(...) ((const Int[]){__VA_ARGS__}[random_bits() % (sizeof((Int[]){__VA_ARGS__}) / sizeof(Int))])

/* ---------------------------------------------------------------- memory */

/* The blocks of one call */
typedef struct {
  void *blocks[128];
  int count;
} Memory;

static void *block(Memory *memory, Int bytes) {
  void *p = malloc((size_t)bytes);
  if (!p || memory->count == 128) exit(2);
  return memory->blocks[memory->count++] = p;
}
static double *zeros(Memory *memory, Int n) { return memset(block(memory, 8 * n), 0, (size_t)(8 * n)); }
static void release(Memory *memory) {
  while (memory->count) free(memory->blocks[--memory->count]);
}

typedef struct {
  Int n[4];
} Shape;

static Int last_element(const View *v, Shape s) {
  Int last = 0;
  for (int i = 0; i < 4; i++) last += (s.n[i] - 1) * v->stride[i];
  return last;
}

/* Strides of a tensor whose dimensions are in a random order in memory, sometimes with gaps */
static View random_layout(Shape s) {
  int order[4] = {0, 1, 2, 3};
  for (int i = 3; i > 0; i--) {
    const int j = (int)between(0, i), t = order[i];
    order[i] = order[j], order[j] = t;
  }
  View v = {0};
  Int size = 1;
  for (int i = 3; i >= 0; i--) v.stride[order[i]] = size, size *= s.n[order[i]] + between(0, 1);
  return v;
}

static View uninitialised(Memory *memory, Shape s, int bf16) {
  View v = random_layout(s);
  v.data = block(memory, (last_element(&v, s) + 1) * (bf16 ? 2 : 4));
  return v;
}

static View random_tensor(Memory *memory, Shape s, int bf16) {
  const View v = uninitialised(memory, s, bf16);
  for (Int i = 0; i <= last_element(&v, s); i++) write_value(v.data, i, bf16, random_real());
  return v;
}

/* Numbers [batch, heads, tokens] in double, about as large as `size`; sometimes one for all heads or sequences */
static View random_numbers(Memory *memory, Shape s, double around, double size) {
  View v = random_layout(s);
  double *x = v.data = block(memory, 8 * (last_element(&v, s) + 1));
  for (Int i = 0; i <= last_element(&v, s); i++) x[i] = around + size * random_real();
  for (int i = 0; i < 2; i++)
    if (one_in(3)) v.stride[i] = 0;
  return v;
}

static View uninitialised_numbers(Memory *memory, Shape s) {
  View v = random_layout(s);
  v.data = block(memory, 8 * (last_element(&v, s) + 1));
  return v;
}

static float *random_table(Memory *memory, Int n, float around) {
  float *t = block(memory, 4 * n);
  for (Int i = 0; i < n; i++) t[i] = around + 0.7f * random_real();
  return t;
}

/* ---------------------------------------------------------------- calls */

static Shape like_q(const Call *c) { return (Shape){{c->batch, c->heads, c->queries, c->head_dim}}; }
static Shape like_k(const Call *c) { return (Shape){{c->batch, c->kv_heads, c->keys, c->head_dim}}; }
static Shape like_v(const Call *c) { return (Shape){{c->batch, c->kv_heads, c->keys, c->value_dim}}; }
static Shape like_p(const Call *c) { return (Shape){{c->batch, c->heads, c->queries, c->query_dim}}; }
static Shape like_t(const Call *c) { return (Shape){{c->batch, c->kv_heads, c->keys, c->key_dim}}; }
static Shape by_query(const Call *c) { return (Shape){{c->batch, c->heads, c->queries, 1}}; }
static Shape by_key(const Call *c) { return (Shape){{c->batch, c->heads, c->keys, 1}}; }
static Shape like_out(const Call *c) { return (Shape){{c->batch, c->heads, c->queries, c->value_dim}}; }

static Int random_length(void) {
  return one_in(2) ? between(1, 40) : ONE_OF(1, 2, 64, 100, 127, 128, 129, 144, 160, 200, 255, 256, 257, 300);
}

static void random_sizes(Call *c) {
  c->batch = between(1, 3), c->kv_heads = between(1, 3), c->heads = c->kv_heads * between(1, 3);
  c->queries = random_length(), c->keys = random_length();
  if (one_in(4)) { /* decoding: up to several chunks of keys, and one query more than FEW_QUERIES */
    c->queries = between(1, FEW_QUERIES + 1);
    c->keys = one_in(2) ? c->keys : ONE_OF(CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 1300);
  }
  if (c->queries * c->keys > 20000) c->batch = between(1, 2), c->kv_heads = between(1, 2), c->heads = 2;
  c->head_dim = one_in(8) ? ONE_OF(64, 80, 128, 129) : between(1, 40);
  c->value_dim = one_in(8) ? ONE_OF(64, 80, 128, 129) : one_in(2) ? c->head_dim : between(1, 40);
  c->lowest = one_in(4) ? -between(0, 200) : INT64_MIN;
  c->highest = one_in(2) ? 0 : one_in(4) ? between(0, 200) : INT64_MAX;
  c->bf16 = one_in(4), c->threads = between(1, 4);
  c->scale = random_real() * 0.5;
  c->dropout = one_in(4) ? (double)ONE_OF(1, 5, 9) / 10 : 0, c->seed = random_bits();
  const Int clip = one_in(4) ? 700 : ONE_OF(0, 1, 3, 20, 126, 127, 128, 129), other = one_in(2) ? clip : between(0, 30);
  c->first_offset = -clip, c->columns = clip + other + 1;
  if (one_in(8)) c->first_offset = between(-300, 300); /* a call whose offsets are all on one side */
}

typedef enum { CONSECUTIVE, EDGE, PACKED, RANDOM, GAPPED, REPEATED, REVERSED, PATTERNS } Pattern;

static void random_row(Pattern pattern, Int first, Int n, Int *pos) {
  const Int jump = between(1, n);
  for (Int i = 0; i < n; i++) {
    pos[i] = first + i;
    if (pattern == PACKED && i >= jump) pos[i] -= jump;
    if (pattern == RANDOM) pos[i] = first + between(-300, 300);
    if (pattern == GAPPED && i > 0) pos[i] = pos[i - 1] + between(1, 3);
    if (pattern == REPEATED) pos[i] = first + i / 2;
    if (pattern == REVERSED) pos[i] = first - i;
  }
}

/* Positions [batch, queries] and [batch, keys]. Under EDGE the offsets of the first tile begin, or end, within one place
   of an end of the tables: there it is decided whether the tile is FAR. */
static void random_positions(Call *c, Memory *memory) {
  const int shared = one_in(3);
  const Int rows = shared ? 1 : c->batch, gap = between(0, 1);
  Int *q_pos = block(memory, 8 * ((rows - 1) * (c->queries + gap) + c->queries));
  Int *k_pos = block(memory, 8 * ((rows - 1) * (c->keys + gap) + c->keys));
  c->q_pos = q_pos, c->k_pos = k_pos;
  c->q_pos_stride = shared ? 0 : c->queries + gap, c->k_pos_stride = shared ? 0 : c->keys + gap;
  const Int n = min_of(TILE, c->queries), m = min_of(TILE, c->keys);
  const Pattern pattern = one_in(4) ? CONSECUTIVE : one_in(4) ? EDGE : random_bits() % PATTERNS;
  const Pattern of_keys = one_in(8) ? random_bits() % PATTERNS : pattern;
  for (Int b = 0; b < rows; b++) {
    const Int first = one_in(8) ? (Int)1 << 60 : between(-5, 5);
    Int shift = c->queries - c->keys;
    if (pattern == EDGE) /* the past if causal: the future is hidden, and its tiles are skipped */
      shift = c->highest == 0 || one_in(2) ? c->first_offset - (m - 1) + between(-1, 1)
                                           : c->first_offset + c->columns - 1 + n - 1 + between(-1, 1);
    random_row(pattern, first, c->queries, q_pos + b * c->q_pos_stride);
    random_row(of_keys, first + shift, c->keys, k_pos + b * c->k_pos_stride);
  }
}

static void random_mask(Call *c, Memory *memory) {
  if (one_in(2)) return;
  const int kind = (int)between(0, 4);
  const Shape s = {{one_in(2) ? c->batch : 1, one_in(2) ? c->heads : 1, one_in(2) ? c->queries : 1, c->keys}};
  c->mask = random_layout(s);
  const Int size = last_element(&c->mask, s) + 1;
  uint8_t *mask = c->mask.data = block(memory, size);
  for (Int at = 0; at < size; at++)
    mask[at] = kind == 0 ? !one_in(5) : kind == 1 ? one_in(60) : kind == 2 ? 0 : kind == 3 ? 1 : at % 300 < 140;
  for (int i = 0; i < 3; i++)
    if (s.n[i] == 1) c->mask.stride[i] = 0;
}

static double largest_bias; /* of the call; only that of `fall` is large */

/* Makes a call one whose tiles may vanish: no terms without a bound, and a bias that falls with the distance */
static void fall(Call *c, Memory *memory) {
  c->query = c->key = c->value = NULL, c->temperature.data = c->distant.data = c->left.data = c->right.data = NULL;
  c->softcap = 0, c->vector_gain = 0;
  c->first_offset = -between(0, 400), c->columns = between(1, 800), c->bias_heads = one_in(2) ? c->heads : 1;
  c->level = one_in(2) ? random_table(memory, c->level_heads * c->columns, 1) : NULL;
  c->gain = one_in(2) ? random_table(memory, c->gain_heads * c->columns, 1) : NULL;
  float *bias = random_table(memory, c->bias_heads * c->columns, 0);
  for (Int h = 0; h < c->bias_heads; h++) {
    const float slope = 2 * random_real();
    for (Int n = 0; n < c->columns; n++)
      bias[h * c->columns + n] += slope * (float)(one_in(200) ? 0 : llabs(n + c->first_offset));
  }
  for (Int n = 0; n < c->bias_heads * c->columns; n++) largest_bias = fmax(largest_bias, fabs(bias[n]));
  c->bias = bias;
}

static Call random_call(Memory *memory) {
  Call c = {0};
  largest_bias = 0;
  random_sizes(&c);
  const int bf16 = (int)c.bf16;
  c.query_dim = c.key_dim = c.head_dim, c.raw_q_bf16 = c.raw_k_bf16 = bf16;
  c.q = random_tensor(memory, like_q(&c), bf16), c.k = random_tensor(memory, like_k(&c), bf16);
  c.v = random_tensor(memory, like_v(&c), bf16), c.grad = random_tensor(memory, like_out(&c), 0);
  if (one_in(2)) {
    c.query_dim = one_in(4) ? c.head_dim : between(1, 40), c.raw_q_bf16 = one_in(4);
    c.raw_q = random_tensor(memory, like_p(&c), (int)c.raw_q_bf16);
  }
  if (one_in(2)) {
    c.key_dim = one_in(4) ? c.head_dim : between(1, 40), c.raw_k_bf16 = one_in(4);
    c.raw_k = random_tensor(memory, like_t(&c), (int)c.raw_k_bf16);
  }
  random_positions(&c, memory);
  random_mask(&c, memory);
  c.vector_gain = random_bits() % 2;
  if (one_in(3)) { /* distant rotations, which do not fit a gain per coordinate */
    c.distance = ONE_OF(0, 1, 5, 30, 127, 128, 200), c.vector_gain = 0;
    c.left = random_tensor(memory, like_q(&c), bf16), c.right = random_tensor(memory, like_q(&c), bf16);
    c.distant = random_tensor(memory, like_k(&c), bf16);
  }
  const double apart = one_in(3) ? 1e6 : 0; /* levels that are large and nearly cancel */
  if (one_in(3)) c.query_level = random_numbers(memory, by_query(&c), apart, 2);
  if (apart > 0 ? c.query_level.data != NULL : one_in(3)) c.key_level = random_numbers(memory, by_key(&c), -apart, 2);
  if (one_in(3)) c.temperature = random_numbers(memory, by_query(&c), one_in(4) ? 0 : 1, 1);
#define TABLE(name, size, around, odds)                                                                                \
  c.name##_heads = one_in(2) ? c.heads : 1;                                                                            \
  if (one_in(odds)) c.name = random_table(memory, c.name##_heads * c.columns * (size), around);
  TABLE(bias, 1, 0, 2)
  TABLE(gain, c.vector_gain ? c.head_dim : 1, 1, 2)
  TABLE(query, c.query_dim, 0, 2)
  TABLE(key, c.key_dim, 0, 2)
  TABLE(value, c.value_dim, 0, 2)
  TABLE(level, 1, 1, 2)
#undef TABLE
  if (one_in(3)) c.softcap = (double)ONE_OF(1, 3, 10, 100) / 2;
  if (one_in(3)) {
    float *sinks = random_table(memory, c.heads, 0);
    for (Int h = 0; h < c.heads; h++) sinks[h] = one_in(6) ? -INFINITY : sinks[h] * (float)ONE_OF(1, 1, 20);
    c.sinks = sinks;
  }
  if (one_in(4)) fall(&c, memory);
  return c;
}

/* Every output of a call and its backward pass; one table gradient in six is not wanted */
#define TABLE_SIZE(c, name, size) ((c)->name##_heads * (c)->columns * (size))
#define GAIN_SIZE(c) ((c)->vector_gain ? (c)->head_dim : 1)
static void make_outputs(Call *c, Memory *memory) {
  const int bf16 = (int)c->bf16;
  c->out = uninitialised(memory, like_out(c), 0);
  c->lse = block(memory, 8 * c->batch * c->heads * c->queries);
  c->dq = uninitialised(memory, like_q(c), bf16), c->dk = uninitialised(memory, like_k(c), bf16);
  c->dv = uninitialised(memory, like_v(c), bf16);
  if (c->distant.data) {
    c->dleft = uninitialised(memory, like_q(c), bf16), c->dright = uninitialised(memory, like_q(c), bf16);
    c->ddistant = uninitialised(memory, like_k(c), bf16);
  }
  if (c->query_level.data) c->dquery_level = uninitialised_numbers(memory, by_query(c));
  if (c->key_level.data) c->dkey_level = uninitialised_numbers(memory, by_key(c));
  if (c->temperature.data) c->dtemperature = uninitialised_numbers(memory, by_query(c));
  if (c->raw_q.data) c->draw_q = uninitialised(memory, like_p(c), (int)c->raw_q_bf16);
  if (c->raw_k.data) c->draw_k = uninitialised(memory, like_t(c), (int)c->raw_k_bf16);
#define GRADIENT(name, size)                                                                                           \
  if (c->name && !one_in(6)) {                                                                                         \
    c->d##name = block(memory, 4 * TABLE_SIZE(c, name, size));                                                         \
    memset(c->d##name, 0, (size_t)(4 * TABLE_SIZE(c, name, size)));                                                    \
  }
  GRADIENT(bias, 1)
  GRADIENT(gain, GAIN_SIZE(c))
  GRADIENT(query, c->query_dim)
  GRADIENT(key, c->key_dim)
  GRADIENT(value, c->value_dim)
  GRADIENT(level, 1)
#undef GRADIENT
  if (c->sinks && !one_in(6)) c->dsinks = block(memory, 4 * c->batch * c->heads);
}

/* ---------------------------------------------------------------- the reference */

/* Sums in double: values, and the sizes of what was added. Rounding in float32 is in proportion to the sizes. */
typedef struct {
  double *value, *size;
} Sums;

static Sums make_sums(Memory *memory, Int n) { return (Sums){zeros(memory, n), zeros(memory, n)}; }
static NOT_CHECKED void add(Sums s, Int at, double value, double size) { s.value[at] += value, s.size[at] += size; }

typedef struct {
  const Call *call;
  double *q, *k, *v, *raw_q, *raw_k, *grad; /* contiguous */
  double *weight, *factor;                  /* of the keys of one query: softmax, dropout */
  double *left, *right, *distant, *query_level, *key_level, *temperature;
  Sums out, dq, dk, dv, draw_q, draw_k, dbias, dgain, dquery, dkey, dvalue, dlevel, dsinks;
  Sums dleft, dright, ddistant, dquery_level, dkey_level, dtemperature;
  double *slope, *sink; /* of the keys of one query: the derivative of the cap; and the weight of its sink */
} Reference;

static double *in_double(Memory *memory, const View *v, Shape s, int bf16) {
  double *x = zeros(memory, s.n[0] * s.n[1] * s.n[2] * s.n[3]);
  Int at = 0;
  for (Int a = 0; a < s.n[0]; a++)
    for (Int b = 0; b < s.n[1]; b++)
      for (Int i = 0; i < s.n[2]; i++)
        for (Int d = 0; d < s.n[3]; d++)
          x[at++] =
              read_value(v->data, a * v->stride[0] + b * v->stride[1] + i * v->stride[2] + d * v->stride[3], bf16);
  return x;
}

static double *numbers_in_double(Memory *memory, const View *v, Shape s) {
  double *x = zeros(memory, s.n[0] * s.n[1] * s.n[2]);
  Int at = 0;
  for (Int a = 0; a < s.n[0]; a++)
    for (Int b = 0; b < s.n[1]; b++)
      for (Int i = 0; i < s.n[2]; i++)
        x[at++] = ((const double *)v->data)[a * v->stride[0] + b * v->stride[1] + i * v->stride[2]];
  return x;
}

static void refer_to_numbers(Reference *r, const Call *c, Memory *memory) {
  const Int queries = c->batch * c->heads * c->queries, keys = c->batch * c->heads * c->keys;
  if (c->query_level.data) r->query_level = numbers_in_double(memory, &c->query_level, by_query(c));
  if (c->key_level.data) r->key_level = numbers_in_double(memory, &c->key_level, by_key(c));
  if (c->temperature.data) r->temperature = numbers_in_double(memory, &c->temperature, by_query(c));
  r->dquery_level = make_sums(memory, queries), r->dkey_level = make_sums(memory, keys);
  r->dtemperature = make_sums(memory, queries), r->dlevel = make_sums(memory, c->heads * c->columns);
}

static Reference make_reference(const Call *c, Memory *memory) {
  const int bf16 = (int)c->bf16;
  const Int q = c->batch * c->heads * c->queries, k = c->batch * c->kv_heads * c->keys, table = c->heads * c->columns;
  Reference r = {.call = c};
  r.q = in_double(memory, &c->q, like_q(c), bf16), r.k = in_double(memory, &c->k, like_k(c), bf16);
  r.v = in_double(memory, &c->v, like_v(c), bf16), r.grad = in_double(memory, &c->grad, like_out(c), 0);
  r.raw_q = c->raw_q.data ? in_double(memory, &c->raw_q, like_p(c), (int)c->raw_q_bf16) : r.q;
  r.raw_k = c->raw_k.data ? in_double(memory, &c->raw_k, like_t(c), (int)c->raw_k_bf16) : r.k;
  r.weight = zeros(memory, c->keys), r.factor = zeros(memory, c->keys);
  r.slope = zeros(memory, c->keys), r.sink = zeros(memory, 1), r.dsinks = make_sums(memory, c->batch * c->heads);
  r.out = make_sums(memory, q * c->value_dim), r.dv = make_sums(memory, k * c->value_dim);
  r.dq = make_sums(memory, q * c->head_dim), r.dk = make_sums(memory, k * c->head_dim);
  r.draw_q = c->raw_q.data ? make_sums(memory, q * c->query_dim) : r.dq;
  r.draw_k = c->raw_k.data ? make_sums(memory, k * c->key_dim) : r.dk;
  r.dbias = make_sums(memory, table), r.dgain = make_sums(memory, table * c->head_dim);
  r.dquery = make_sums(memory, table * c->query_dim), r.dkey = make_sums(memory, table * c->key_dim);
  r.dvalue = make_sums(memory, table * c->value_dim);
  refer_to_numbers(&r, c, memory);
  if (!c->distant.data) return r;
  r.left = in_double(memory, &c->left, like_q(c), bf16), r.right = in_double(memory, &c->right, like_q(c), bf16);
  r.distant = in_double(memory, &c->distant, like_k(c), bf16), r.ddistant = make_sums(memory, k * c->head_dim);
  r.dleft = make_sums(memory, q * c->head_dim), r.dright = make_sums(memory, q * c->head_dim);
  return r;
}

static NOT_CHECKED Int column_before_clip(const Call *c, Int b, Int i, Int j) {
  return c->k_pos[b * c->k_pos_stride + j] - c->q_pos[b * c->q_pos_stride + i] - c->first_offset;
}

static NOT_CHECKED int outside(const Call *c, Int b, Int i, Int j) {
  const Int r = c->k_pos[b * c->k_pos_stride + j] - c->q_pos[b * c->q_pos_stride + i];
  return r < c->lowest || r > c->highest;
}

static NOT_CHECKED int masked(const Call *c, Int b, Int h, Int i, Int j) {
  const Int *s = c->mask.stride;
  return c->mask.data && !((const uint8_t *)c->mask.data)[b * s[0] + h * s[1] + i * s[2] + j * s[3]];
}

/* The factor of a weight under dropout: `row_dropout` and `dropout_factors`, one pair at a time */
static NOT_CHECKED double drop_or_keep(const Call *c, Int b, Int h, Int i, Int j) {
  if (c->dropout == 0) return 1;
  uint64_t row = (uint64_t)c->seed + (uint64_t)((b * c->heads + h) * c->queries + i) * 0x9e3779b97f4a7c15u;
  row = (row ^ (row >> 30)) * 0xbf58476d1ce4e5b9u;
  row = (row ^ (row >> 27)) * 0x94d049bb133111ebu;
  uint32_t x = (uint32_t)j * 0x9e3779b1u + (uint32_t)(row >> 16);
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  x ^= x >> 16;
  return (double)x / 4294967296.0 >= c->dropout ? 1 / (1 - c->dropout) : 0;
}

/* Where pair (i, j) of a head begins in each tensor and table; tables in units of a column */
typedef struct {
  Int q, k, v, p, t, out, bias, gain, query, key, value, level;
  Int by_query, by_key; /* in numbers of each token and head */
  Int r;
} Place;

static NOT_CHECKED Place place_of(const Call *c, Int b, Int h, Int i, Int j) {
  const Int query = (b * c->heads + h) * c->queries + i, kv = h / (c->heads / c->kv_heads);
  const Int key = (b * c->kv_heads + kv) * c->keys + j;
  const Int column = max_of(0, min_of(column_before_clip(c, b, i, j), c->columns - 1));
#define COLUMN(name) ((c->name##_heads == 1 ? 0 : h) * c->columns + column)
  return (Place){.q = query * c->head_dim,
                 .k = key * c->head_dim,
                 .v = key * c->value_dim,
                 .p = query * c->query_dim,
                 .t = key * c->key_dim,
                 .out = query * c->value_dim,
                 .bias = COLUMN(bias),
                 .gain = COLUMN(gain),
                 .query = COLUMN(query),
                 .key = COLUMN(key),
                 .value = COLUMN(value),
                 .level = COLUMN(level),
                 .by_query = query,
                 .by_key = (b * c->heads + h) * c->keys + j,
                 .r = c->k_pos[b * c->k_pos_stride + j] - c->q_pos[b * c->q_pos_stride + i]};
#undef COLUMN
}

static NOT_CHECKED double gain_of(const Call *c, Place at, Int x) {
  return !c->gain ? 1 : c->vector_gain ? c->gain[at.gain * c->head_dim + x] : c->gain[at.gain];
}

/* v_j + value_r, one coordinate, and the size of the two */
static NOT_CHECKED double value_of(const Reference *r, Place at, Int x, double *size) {
  const double v = r->v[at.v + x], term = r->call->value ? r->call->value[at.value * r->call->value_dim + x] : 0;
  *size = fabs(v) + fabs(term);
  return v + term;
}

/* The queries and keys of the content product of a pair, and where their gradients go */
typedef struct {
  const double *q, *k;
  Sums dq, dk;
} Rotation;

static NOT_CHECKED Rotation rotation_of(const Reference *r, Place at) {
  if (!r->call->distant.data || (at.r >= -r->call->distance && at.r <= r->call->distance))
    return (Rotation){r->q, r->k, r->dq, r->dk};
  if (at.r < 0) return (Rotation){r->left, r->distant, r->dleft, r->ddistant};
  return (Rotation){r->right, r->distant, r->dright, r->ddistant};
}

/* e_i + d_j */
static NOT_CHECKED double levels_of(const Reference *r, Place at) {
  return (r->query_level ? r->query_level[at.by_query] : 0) + (r->key_level ? r->key_level[at.by_key] : 0);
}

/* Before the temperature */
static NOT_CHECKED double logit_of(const Reference *r, Place at) {
  const Call *c = r->call;
  const Rotation of = rotation_of(r, at);
  double s = 0;
  for (Int x = 0; x < c->head_dim; x++) s += of.q[at.q + x] * of.k[at.k + x] * gain_of(c, at, x);
  for (Int x = 0; c->query && x < c->query_dim; x++) s += r->raw_q[at.p + x] * c->query[at.query * c->query_dim + x];
  for (Int x = 0; c->key && x < c->key_dim; x++) s += r->raw_k[at.t + x] * c->key[at.key * c->key_dim + x];
  const double level = c->level ? c->level[at.level] : 1;
  return c->scale * s + (c->bias ? c->bias[at.bias] : 0) + level * levels_of(r, at);
}

/* The weights and the output of one query */
static NOT_CHECKED void reference_forward(const Reference *r, Int b, Int h, Int i) {
  const Call *c = r->call;
  double top = c->sinks ? c->sinks[h] : -INFINITY, total = 0;
  for (Int j = 0; j < c->keys; j++) {
    const int hidden = outside(c, b, i, j) || masked(c, b, h, i, j);
    const Place at = place_of(c, b, h, i, j);
    double logit = logit_of(r, at) * (r->temperature ? r->temperature[at.by_query] : 1);
    r->slope[j] = 1;
    if (c->softcap > 0) {
      const double t = tanh(logit / c->softcap);
      logit = c->softcap * t, r->slope[j] = 1 - t * t;
    }
    r->weight[j] = hidden ? -INFINITY : logit;
    if (r->weight[j] > top) top = r->weight[j];
  }
  *r->sink = c->sinks && c->sinks[h] > -INFINITY ? exp(c->sinks[h] - top) : 0;
  total = *r->sink;
  for (Int j = 0; j < c->keys; j++) {
    r->weight[j] = top == -INFINITY ? 0 : exp(r->weight[j] - top);
    r->factor[j] = drop_or_keep(c, b, h, i, j);
    total += r->weight[j];
  }
  *r->sink = total > 0 ? *r->sink / total : 0;
  for (Int j = 0; j < c->keys; j++) {
    const Place at = place_of(c, b, h, i, j);
    r->weight[j] = total > 0 ? r->weight[j] / total : 0;
    const double kept = r->weight[j] * r->factor[j];
    if (kept == 0) continue;
    for (Int x = 0; x < c->value_dim; x++) {
      double size;
      const double value = value_of(r, at, x, &size);
      add(r->out, at.out + x, kept * value, kept * size);
    }
  }
}

/* What the gradient of one logit adds to those of q, k and the tables; `d` is that gradient, `size` its size */
static NOT_CHECKED void reference_logit_gradient(const Reference *r, Place at, double d, double size) {
  const Call *c = r->call;
  const Rotation of = rotation_of(r, at);
  if (r->temperature) {
    const double logit = logit_of(r, at), temperature = r->temperature[at.by_query];
    add(r->dtemperature, at.by_query, d * logit, size * (fabs(logit) + 1));
    d *= temperature, size *= fabs(temperature);
  }
  if (c->bias) add(r->dbias, at.bias, d, size);
  const double level = c->level ? c->level[at.level] : 1, levels = levels_of(r, at);
  add(r->dquery_level, at.by_query, d * level, size * fabs(level));
  add(r->dkey_level, at.by_key, d * level, size * fabs(level));
  if (c->level) add(r->dlevel, at.level, d * levels, size * fabs(levels));
  d *= c->scale, size *= fabs(c->scale);
  for (Int x = 0; x < c->head_dim; x++) {
    const double q = of.q[at.q + x], k = of.k[at.k + x], gain = gain_of(c, at, x);
    add(of.dq, at.q + x, d * k * gain, size * fabs(k * gain));
    add(of.dk, at.k + x, d * q * gain, size * fabs(q * gain));
    if (c->gain) add(r->dgain, c->vector_gain ? at.gain * c->head_dim + x : at.gain, d * q * k, size * fabs(q * k));
  }
  for (Int x = 0; c->query && x < c->query_dim; x++) {
    const double a = c->query[at.query * c->query_dim + x], p = r->raw_q[at.p + x];
    add(r->draw_q, at.p + x, d * a, size * fabs(a));
    add(r->dquery, at.query * c->query_dim + x, d * p, size * fabs(p));
  }
  for (Int x = 0; c->key && x < c->key_dim; x++) {
    const double a = c->key[at.key * c->key_dim + x], t = r->raw_k[at.t + x];
    add(r->draw_k, at.t + x, d * a, size * fabs(a));
    add(r->dkey, at.key * c->key_dim + x, d * t, size * fabs(t));
  }
}

/* What one query adds to every gradient */
static NOT_CHECKED void reference_backward(const Reference *r, Int b, Int h, Int i) {
  const Call *c = r->call;
  double delta = 0, delta_size = 0;
  for (Int x = 0, at = place_of(c, b, h, i, 0).out; x < c->value_dim; x++, at++)
    delta += r->grad[at] * r->out.value[at], delta_size += fabs(r->grad[at]) * r->out.size[at];
  add(r->dsinks, b * c->heads + h, -*r->sink * delta, *r->sink * delta_size);
  for (Int j = 0; j < c->keys; j++) {
    if (r->weight[j] == 0) continue;
    const Place at = place_of(c, b, h, i, j);
    const double kept = r->weight[j] * r->factor[j];
    double dweight = 0, size = 0;
    for (Int x = 0; x < c->value_dim; x++) {
      double of_value;
      const double g = r->grad[at.out + x];
      dweight += g * value_of(r, at, x, &of_value), size += fabs(g) * of_value;
      add(r->dv, at.v + x, kept * g, fabs(kept * g));
      if (c->value) add(r->dvalue, at.value * c->value_dim + x, kept * g, fabs(kept * g));
    }
    const double gradient = r->weight[j] * (dweight * r->factor[j] - delta);
    const double of_gradient = r->weight[j] * (size * r->factor[j] + delta_size);
    /* The slope of the cap moves with the rounding of the logit, by some units of 1e-7 however small the slope is. */
    reference_logit_gradient(r, at, gradient * r->slope[j], of_gradient * (r->slope[j] + (c->softcap > 0 ? 0.05 : 0)));
  }
}

/* ---------------------------------------------------------------- comparisons */

static uint64_t seed_of_call;
static double worst; /* error of a result in float32, as a part of what is allowed */

static void fail(const char *what, Int at, double got, double expected) {
  printf("call %llu: %s[%lld]: got %.9g, expected %.9g\n", (unsigned long long)seed_of_call, what, (long long)at, got,
         expected);
  exit(1);
}

/* `rounded`: the result is in bfloat16. A large logit is rounded by as much more, and its weight with it. */
static void compare(double got, Sums expected, Int at, int rounded, const char *what) {
  const double value = expected.value[at], unit = 8e-6 * (1 + largest_bias / 50);
  const double error = fabs(got - value) / (unit * expected.size[at] + (rounded ? fabs(value) / 256 : 0) + 1e-7);
  if (!(error <= 1)) fail(what, at, got, value);
  if (!rounded && error > worst) worst = error;
}

static void compare_tensor(Memory *memory, const View *v, Shape s, int bf16, Sums expected, const char *what) {
  const double *got = in_double(memory, v, s, bf16);
  for (Int i = 0; i < s.n[0] * s.n[1] * s.n[2] * s.n[3]; i++) compare(got[i], expected, i, bf16, what);
}

static void compare_table(const float *got, Int n, Sums expected, const char *what) {
  for (Int i = 0; got && i < n; i++) compare(got[i], expected, i, 0, what);
}

static void compare_numbers(Memory *memory, const View *v, Shape s, Sums expected, const char *what) {
  if (!v->data) return;
  const double *got = numbers_in_double(memory, v, s);
  for (Int i = 0; i < s.n[0] * s.n[1] * s.n[2]; i++) compare(got[i], expected, i, 0, what);
}

static void compare_results(const Call *c, const Reference *r, Memory *memory) {
  const int bf16 = (int)c->bf16;
  compare_tensor(memory, &c->out, like_out(c), 0, r->out, "out");
  compare_tensor(memory, &c->dq, like_q(c), bf16, r->dq, "dq");
  compare_tensor(memory, &c->dk, like_k(c), bf16, r->dk, "dk");
  compare_tensor(memory, &c->dv, like_v(c), bf16, r->dv, "dv");
  if (c->raw_q.data) compare_tensor(memory, &c->draw_q, like_p(c), (int)c->raw_q_bf16, r->draw_q, "draw_q");
  if (c->raw_k.data) compare_tensor(memory, &c->draw_k, like_t(c), (int)c->raw_k_bf16, r->draw_k, "draw_k");
  if (c->distant.data) {
    compare_tensor(memory, &c->dleft, like_q(c), bf16, r->dleft, "dleft");
    compare_tensor(memory, &c->dright, like_q(c), bf16, r->dright, "dright");
    compare_tensor(memory, &c->ddistant, like_k(c), bf16, r->ddistant, "ddistant");
  }
  compare_numbers(memory, &c->dquery_level, by_query(c), r->dquery_level, "dquery_level");
  compare_numbers(memory, &c->dkey_level, by_key(c), r->dkey_level, "dkey_level");
  compare_numbers(memory, &c->dtemperature, by_query(c), r->dtemperature, "dtemperature");
  compare_table(c->dlevel, TABLE_SIZE(c, level, 1), r->dlevel, "dlevel");
  compare_table(c->dbias, TABLE_SIZE(c, bias, 1), r->dbias, "dbias");
  compare_table(c->dgain, TABLE_SIZE(c, gain, GAIN_SIZE(c)), r->dgain, "dgain");
  compare_table(c->dquery, TABLE_SIZE(c, query, c->query_dim), r->dquery, "dquery");
  compare_table(c->dkey, TABLE_SIZE(c, key, c->key_dim), r->dkey, "dkey");
  compare_table(c->dvalue, TABLE_SIZE(c, value, c->value_dim), r->dvalue, "dvalue");
  compare_table(c->dsinks, c->batch * c->heads, r->dsinks, "dsinks");
}

static Int kinds[4]; /* tiles of each kind in all calls */

/* The kind of a tile, from its pairs. `make_tile` decides it from spans of positions: a tile that it takes for BAND
   instead of FAR gives the right values, but slowly. */
static void check_tile(const Call *c, const Tile *tile) {
  int parts = 0;
  Int hidden = 0, future = 0, mask = 0, low = INT64_MAX, high = INT64_MIN, in_order = 1;
  for (Int i = 0; i < tile->queries; i++)
    for (Int j = 0; j < tile->keys; j++) {
      const Int a = tile->first_query + i, b = tile->first_key + j, column = column_before_clip(c, tile->b, a, b);
      const int late = outside(c, tile->b, a, b), out = masked(c, tile->b, tile->h, a, b);
      hidden += late || out, future += late, mask += out;
      const Int r = column + c->first_offset;
      if (!late) parts |= !c->distant.data ? NEAR : r < -c->distance ? LEFT : r > c->distance ? RIGHT : NEAR;
      low = min_of(low, column), high = max_of(high, column);
      in_order &= column == column_before_clip(c, tile->b, tile->first_query, tile->first_key) + j - i;
    }
  const Int pairs = tile->queries * tile->keys, ends[2] = {COLUMN_PADDING, COLUMN_PADDING + c->columns - 1};
  Kind kind = in_order ? BAND : SCATTER;
  Int column = in_order ? low + tile->queries - 1 + COLUMN_PADDING : tile->column;
  if (!(c->bias || c->gain || c->query || c->key || c->value || c->level) || high <= 0) kind = FAR, column = ends[0];
  if (kind != FAR && low >= c->columns - 1) kind = FAR, column = ends[1];
  /* Out of order, offsets on either side of the window may leave none within it: computed, to no effect */
  if ((future == pairs && (in_order || tile->kind == SKIP)) || mask == pairs) kind = SKIP;
  if (tile->kind != kind) fail("kind of tile", tile->first_query, tile->kind, kind);
  kinds[kind]++;
  if (kind == SKIP) return;
  const int surplus = tile->parts & ~parts; /* the spans of a tile out of order may hold offsets that no pair has */
  if ((parts & ~tile->parts) || (in_order && surplus)) fail("parts of tile", tile->first_query, tile->parts, parts);
  if (tile->some_hidden != (hidden > 0)) fail("some_hidden", tile->first_query, tile->some_hidden, hidden > 0);
  if (tile->column != column) fail("column of tile", tile->first_query, (double)tile->column, (double)column);
  if (kind == FAR && column != ends[tile->far_end]) fail("far_end", tile->first_query, tile->far_end, !tile->far_end);
}

static void check_tiles(const Call *c, Memory *memory) {
  Span *q_spans = block(memory, PADDED_QUERIES(c) / TILE * (Int)sizeof(Span));
  Span *k_spans = block(memory, PADDED_KEYS(c) / TILE * (Int)sizeof(Span));
  for (Int b = 0; b < c->batch; b++) {
    find_spans(c->q_pos + b * c->q_pos_stride, c->queries, q_spans);
    find_spans(c->k_pos + b * c->k_pos_stride, c->keys, k_spans);
    for (Int i = 0; i < c->queries; i += TILE)
      for (Int j = 0; j < c->keys; j += TILE) {
        const Tile tile = make_tile(c, b, b % c->heads, i, j, q_spans, k_spans);
        check_tile(c, &tile);
      }
  }
}

/* ---------------------------------------------------------------- callers at once */

/* Whether two tensors hold the same bits */
static int same_tensor(const View *a, const View *b, Shape s, int bf16) {
  Memory memory = {.count = 0};
  const Int bytes = 8 * s.n[0] * s.n[1] * s.n[2] * s.n[3];
  const int same = !memcmp(in_double(&memory, a, s, bf16), in_double(&memory, b, s, bf16), (size_t)bytes);
  release(&memory);
  return same;
}

static int same_numbers(const View *a, const View *b, Shape s) {
  if (!a->data) return 1;
  Memory memory = {.count = 0};
  const Int bytes = 8 * s.n[0] * s.n[1] * s.n[2];
  const int same = !memcmp(numbers_in_double(&memory, a, s), numbers_in_double(&memory, b, s), (size_t)bytes);
  release(&memory);
  return same;
}

typedef struct {
  Call call;
  const Call *expected;
  Memory memory;
  int same;
} Caller;

static void *call_again(void *of_caller) {
  Caller *caller = of_caller;
  const Call *a = &caller->call, *b = caller->expected;
  const int bf16 = (int)a->bf16;
  if (locant_forward(a) || locant_backward(a)) exit(2);
  caller->same = same_tensor(&a->out, &b->out, like_out(a), 0) && same_tensor(&a->dq, &b->dq, like_q(a), bf16) &&
                 same_tensor(&a->dk, &b->dk, like_k(a), bf16) && same_tensor(&a->dv, &b->dv, like_v(a), bf16) &&
                 (!a->raw_q.data || same_tensor(&a->draw_q, &b->draw_q, like_p(a), (int)a->raw_q_bf16)) &&
                 (!a->raw_k.data || same_tensor(&a->draw_k, &b->draw_k, like_t(a), (int)a->raw_k_bf16));
  if (a->distant.data)
    caller->same &= same_tensor(&a->dleft, &b->dleft, like_q(a), bf16) &&
                    same_tensor(&a->dright, &b->dright, like_q(a), bf16) &&
                    same_tensor(&a->ddistant, &b->ddistant, like_k(a), bf16);
  caller->same &= same_numbers(&a->dquery_level, &b->dquery_level, by_query(a)) &&
                  same_numbers(&a->dkey_level, &b->dkey_level, by_key(a)) &&
                  same_numbers(&a->dtemperature, &b->dtemperature, by_query(a));
#define SAME(name, size)                                                                                               \
  if (a->d##name && b->d##name)                                                                                        \
    caller->same &= !memcmp(a->d##name, b->d##name, (size_t)(4 * TABLE_SIZE(a, name, size)));
  SAME(bias, 1)
  SAME(gain, GAIN_SIZE(a))
  SAME(query, a->query_dim)
  SAME(key, a->key_dim)
  SAME(value, a->value_dim)
  SAME(level, 1)
#undef SAME
  if (a->dsinks && b->dsinks) caller->same &= !memcmp(a->dsinks, b->dsinks, (size_t)(4 * a->batch * a->heads));
  return NULL;
}

static void repeat_at_once(const Call *inputs, const Call *expected, int count) {
  Caller *callers = calloc((size_t)count, sizeof *callers);
  pthread_t *threads = calloc((size_t)count, sizeof *threads);
  if (!callers || !threads) exit(2);
  for (int i = 0; i < count; i++) {
    callers[i].call = *inputs, callers[i].expected = expected;
    make_outputs(&callers[i].call, &callers[i].memory);
  }
  for (int i = 0; i < count; i++)
    if (pthread_create(&threads[i], NULL, call_again, &callers[i])) exit(2);
  for (int i = 0; i < count; i++) {
    pthread_join(threads[i], NULL);
    if (!callers[i].same) fail("bits of caller", i, 0, 1);
    release(&callers[i].memory);
  }
  free(callers);
  free(threads);
}

static void one_call(int callers) {
  Memory memory = {.count = 0}, of_reference = {.count = 0};
  const Call inputs = random_call(&memory);
  Call c = inputs;
  make_outputs(&c, &memory);
  check_tiles(&c, &memory);
  if (locant_forward(&c) || locant_backward(&c)) exit(2);
  const Reference r = make_reference(&c, &of_reference);
  for (Int b = 0; b < c.batch; b++)
    for (Int h = 0; h < c.heads; h++)
      for (Int i = 0; i < c.queries; i++) reference_forward(&r, b, h, i), reference_backward(&r, b, h, i);
  compare_results(&c, &r, &of_reference);
  if (callers) repeat_at_once(&inputs, &c, callers);
  release(&of_reference);
  release(&memory);
}

int main(int argc, char **argv) {
  if (argc != 3 && argc != 4) return 3;
  const int calls = atoi(argv[2]);
  for (int i = 0; i < calls; i++) {
    seed_of_call = (uint64_t)atoll(argv[1]) + (uint64_t)i;
    state = seed_of_call * 0x9e3779b97f4a7c15u + 1;
    one_call(argc == 4 ? atoi(argv[3]) : 0);
  }
  printf("%d calls, worst error %.2f of the allowed; tiles: %lld skipped, %lld far, %lld band, %lld scatter\n", calls,
         worst, (long long)kinds[SKIP], (long long)kinds[FAR], (long long)kinds[BAND], (long long)kinds[SCATTER]);
  return 0;
}
