/* Random calls of the kernel in src/locant/attention/fused.c, built with sanitizers: every tensor is a block of exactly
   its own size, with random strides, and results are compared with loops over pairs in double precision.

   cc -fsanitize=address,undefined … fused_fuzz.c && ./a.out SEED CALLS */

#include FUSED
#include <stdio.h>

static uint64_t state;
static uint32_t any(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33);
}
static I from(I a, I b) { return a + any() % (b - a + 1); }
static float real(void) { return (float)any() / 1073741824.0f - 1; }

/* [n0, n1, n2, n3] in a random order of dimensions, sometimes with gaps */
static View tensor(I n0, I n1, I n2, I n3, int bf16, float **start) {
  const I n[4] = {n0, n1, n2, n3};
  int order[4] = {0, 1, 2, 3};
  for (int i = 3; i > 0; i--) {
    int j = (int)from(0, i), t = order[i];
    order[i] = order[j], order[j] = t;
  }
  View v;
  I size = 1, last = 0;
  for (int i = 3; i >= 0; i--) {
    v.stride[order[i]] = size;
    last += (n[order[i]] - 1) * size;
    size *= n[order[i]] + from(0, 1);
  }
  v.data = malloc((size_t)((last + 1) * (bf16 ? 2 : 4)));
  for (I i = 0; i <= last; i++) set_value(v.data, i, bf16, real());
  *start = v.data;
  return v;
}
static double at(const View *v, int bf16, I a, I b, I c, I d) {
  return value_of(v->data, a * v->stride[0] + b * v->stride[1] + c * v->stride[2] + d * v->stride[3], bf16);
}
static float *table(I n, float around) {
  float *t = malloc((size_t)(4 * n));
  for (I i = 0; i < n; i++) t[i] = around + 0.5f * real();
  return t;
}

static double worst;
static void compare(double got, double expected, double tolerance, const char *what) {
  const double error = fabs(got - expected) / tolerance;
  if (!(error <= 1)) {
    printf("%s: got %.9g, expected %.9g\n", what, got, expected);
    exit(1);
  }
  if (error > worst) worst = error;
}

static const I sizes[] = {1, 2, 7, 31, 64, 127, 128, 129, 200, 257, 300};

static void one(void) {
  Call c = {0};
  const int bf16 = any() % 4 == 0;
  c.batch = from(1, 2), c.kv_heads = from(1, 2), c.heads = c.kv_heads * from(1, 2);
  c.lq = sizes[any() % 11], c.lk = sizes[any() % 11], c.d = from(1, 40), c.dv = from(1, 40);
  c.causal = any() % 2, c.bf16 = bf16, c.threads = from(1, 3), c.scale = real() * 0.5;
  float *blocks[32];
  int n = 0;
  c.raw = any() % 2;
  c.q = tensor(c.batch, c.heads, c.lq, c.d, bf16, &blocks[n++]);
  c.k = tensor(c.batch, c.kv_heads, c.lk, c.d, bf16, &blocks[n++]);
  c.v = tensor(c.batch, c.kv_heads, c.lk, c.dv, bf16, &blocks[n++]);
  c.raw_q = c.raw ? tensor(c.batch, c.heads, c.lq, c.d, bf16, &blocks[n++]) : c.q;
  c.raw_k = c.raw ? tensor(c.batch, c.kv_heads, c.lk, c.d, bf16, &blocks[n++]) : c.k;
  c.out = tensor(c.batch, c.heads, c.lq, c.dv, 0, &blocks[n++]);
  c.grad = tensor(c.batch, c.heads, c.lq, c.dv, 0, &blocks[n++]);
  c.dq = tensor(c.batch, c.heads, c.lq, c.d, bf16, &blocks[n++]);
  c.dk = tensor(c.batch, c.kv_heads, c.lk, c.d, bf16, &blocks[n++]);
  c.dv_ = tensor(c.batch, c.kv_heads, c.lk, c.dv, bf16, &blocks[n++]);
  c.draw_q = tensor(c.batch, c.heads, c.lq, c.d, bf16, &blocks[n++]);
  c.draw_k = tensor(c.batch, c.kv_heads, c.lk, c.d, bf16, &blocks[n++]);
  c.lse = table(2 * c.batch * c.heads * c.lq, 0), blocks[n++] = c.lse;
  /* positions: in step, or with jumps, or any */
  I *q_pos = malloc((size_t)(8 * c.batch * c.lq)), *k_pos = malloc((size_t)(8 * c.batch * c.lk));
  const int way = (int)from(0, 2);
  for (I b = 0; b < c.batch; b++) {
    const I first = from(-5, 5), jump = from(0, c.lk);
    for (I j = 0; j < c.lk; j++) k_pos[b * c.lk + j] = way == 2 ? from(-300, 300) : first + j - (way == 1 && j > jump ? jump : 0);
    for (I i = 0; i < c.lq; i++) q_pos[b * c.lq + i] = way == 2 ? from(-300, 300) : first + i + c.lk - c.lq;
  }
  c.q_pos = q_pos, c.k_pos = k_pos, c.q_pos_stride = c.lq, c.k_pos_stride = c.lk;
  const I clip = from(0, 1) ? from(0, 20) : 700;
  c.lo = -clip, c.columns = 2 * clip + 1;
#define TABLE(name, size, around, odds)                                                  \
  c.name##_heads = from(0, 1) ? c.heads : 1;                                             \
  if (any() % odds == 0) {                                                               \
    c.name = blocks[n++] = table(c.name##_heads * c.columns * (size), around);           \
    c.d##name = blocks[n++] = calloc((size_t)(c.name##_heads * c.columns * (size)), 4);  \
  }
  TABLE(bias, 1, 0, 2)
  c.gain_vector = any() % 2;
  TABLE(gain, (c.gain_vector ? c.d : 1), 1, 3)
  TABLE(query, c.d, 0, 2)
  TABLE(key, c.d, 0, 2)
  TABLE(value, c.dv, 0, 2)
  uint8_t *mask = NULL;
  if (any() % 2) {
    const I mb = from(0, 1) ? c.batch : 1, mh = from(0, 1) ? c.heads : 1, mq = from(0, 1) ? c.lq : 1;
    mask = malloc((size_t)(mb * mh * mq * c.lk));
    const int dense = any() % 2;
    for (I i = 0; i < mb * mh * mq * c.lk; i++) mask[i] = dense ? any() % 5 != 0 : any() % 60 == 0;
    c.mask = (View){mask, {mb > 1 ? mh * mq * c.lk : 0, mh > 1 ? mq * c.lk : 0, mq > 1 ? c.lk : 0, 1}};
  }
  if (locant_forward(&c)) exit(2);

  /* the same by pairs */
  const I group = c.heads / c.kv_heads;
  double *p = malloc((size_t)(8 * c.lk)), *o = malloc((size_t)(8 * c.dv));
  double *dq = calloc((size_t)(c.batch * c.heads * c.lq * c.d), 8), *dk = calloc((size_t)(c.batch * c.kv_heads * c.lk * c.d), 8);
  double *rq = calloc((size_t)(c.batch * c.heads * c.lq * c.d), 8), *rk = calloc((size_t)(c.batch * c.kv_heads * c.lk * c.d), 8);
  double *dv = calloc((size_t)(c.batch * c.kv_heads * c.lk * c.dv), 8);
  double *dbias = calloc((size_t)(c.heads * c.columns), 8), *dgain = calloc((size_t)(c.heads * c.columns * c.d), 8);
  double *dquery = calloc((size_t)(c.heads * c.columns * c.d), 8), *dkey = calloc((size_t)(c.heads * c.columns * c.d), 8);
  double *dvalue = calloc((size_t)(c.heads * c.columns * c.dv), 8);
#define OF(name, size) ((c.name##_heads == 1 ? 0 : h) * c.columns + r) * (size)
  for (I b = 0; b < c.batch; b++)
    for (I h = 0; h < c.heads; h++)
      for (I i = 0; i < c.lq; i++) {
        double top = -INFINITY, total = 0;
        const I g = h / group;
#define COLUMN(j) most(0, least(k_pos[b * c.lk + (j)] - q_pos[b * c.lq + i] - c.lo, c.columns - 1))
#define SEEN(j) (!(c.causal && k_pos[b * c.lk + (j)] > q_pos[b * c.lq + i]) && \
                 (!mask || mask[b * c.mask.stride[0] + h * c.mask.stride[1] + i * c.mask.stride[2] + (j)]))
        for (I j = 0; j < c.lk; j++) {
          const I r = COLUMN(j);
          double s = 0;
          for (I x = 0; x < c.d; x++) {
            double gain = !c.gain ? 1 : c.gain_vector ? c.gain[OF(gain, c.d) + x] : c.gain[OF(gain, 1)];
            s += at(&c.q, bf16, b, h, i, x) * at(&c.k, bf16, b, g, j, x) * gain;
            if (c.query) s += at(&c.raw_q, bf16, b, h, i, x) * c.query[OF(query, c.d) + x];
            if (c.key) s += at(&c.raw_k, bf16, b, g, j, x) * c.key[OF(key, c.d) + x];
          }
          p[j] = SEEN(j) ? c.scale * s + (c.bias ? c.bias[OF(bias, 1)] : 0) : -INFINITY;
          if (p[j] > top) top = p[j];
        }
        for (I j = 0; j < c.lk; j++) p[j] = top == -INFINITY ? 0 : exp(p[j] - top), total += p[j];
        memset(o, 0, (size_t)(8 * c.dv));
        for (I j = 0; j < c.lk; j++) {
          const I r = COLUMN(j);
          p[j] = total > 0 ? p[j] / total : 0;
          for (I x = 0; x < c.dv; x++)
            o[x] += p[j] * (at(&c.v, bf16, b, g, j, x) + (c.value ? c.value[OF(value, c.dv) + x] : 0));
        }
        for (I x = 0; x < c.dv; x++) compare(at(&c.out, 0, b, h, i, x), o[x], 2e-5, "out");
        double delta = 0;
        for (I x = 0; x < c.dv; x++) delta += o[x] * at(&c.grad, 0, b, h, i, x);
        for (I j = 0; j < c.lk; j++) {
          if (p[j] == 0) continue;
          const I r = COLUMN(j);
          double pull = 0;
          for (I x = 0; x < c.dv; x++) {
            const double go = at(&c.grad, 0, b, h, i, x);
            pull += go * (at(&c.v, bf16, b, g, j, x) + (c.value ? c.value[OF(value, c.dv) + x] : 0));
            dv[((b * c.kv_heads + g) * c.lk + j) * c.dv + x] += p[j] * go;
            if (c.value) dvalue[OF(value, c.dv) + x] += p[j] * go;
          }
          const double ds = p[j] * (pull - delta), w = ds * c.scale;
          if (c.bias) dbias[OF(bias, 1)] += ds;
          for (I x = 0; x < c.d; x++) {
            const I iq = ((b * c.heads + h) * c.lq + i) * c.d + x, ik = ((b * c.kv_heads + g) * c.lk + j) * c.d + x;
            const double q = at(&c.q, bf16, b, h, i, x), k = at(&c.k, bf16, b, g, j, x);
            const double gain = !c.gain ? 1 : c.gain_vector ? c.gain[OF(gain, c.d) + x] : c.gain[OF(gain, 1)];
            dq[iq] += w * k * gain, dk[ik] += w * q * gain;
            if (c.gain) dgain[c.gain_vector ? OF(gain, c.d) + x : OF(gain, 1)] += w * q * k;
            if (c.query) {
              rq[iq] += w * c.query[OF(query, c.d) + x];
              dquery[OF(query, c.d) + x] += w * at(&c.raw_q, bf16, b, h, i, x);
            }
            if (c.key) {
              rk[ik] += w * c.key[OF(key, c.d) + x];
              dkey[OF(key, c.d) + x] += w * at(&c.raw_k, bf16, b, g, j, x);
            }
          }
        }
      }
  if (locant_backward(&c)) exit(2);
  const double tol = bf16 ? 3e-2 : 2e-3; /* gradients are rounded to bfloat16 */
  for (I b = 0; b < c.batch; b++) {
    for (I h = 0; h < c.heads; h++)
      for (I i = 0; i < c.lq; i++)
        for (I x = 0; x < c.d; x++) {
          const I iq = ((b * c.heads + h) * c.lq + i) * c.d + x;
          compare(at(&c.dq, bf16, b, h, i, x), dq[iq] + (c.raw ? 0 : rq[iq]), tol, "dq");
          if (c.raw) compare(at(&c.draw_q, bf16, b, h, i, x), rq[iq], tol, "draw_q");
        }
    for (I g = 0; g < c.kv_heads; g++)
      for (I j = 0; j < c.lk; j++) {
        for (I x = 0; x < c.d; x++) {
          const I ik = ((b * c.kv_heads + g) * c.lk + j) * c.d + x;
          compare(at(&c.dk, bf16, b, g, j, x), dk[ik] + (c.raw ? 0 : rk[ik]), tol, "dk");
          if (c.raw) compare(at(&c.draw_k, bf16, b, g, j, x), rk[ik], tol, "draw_k");
        }
        for (I x = 0; x < c.dv; x++)
          compare(at(&c.dv_, bf16, b, g, j, x), dv[((b * c.kv_heads + g) * c.lk + j) * c.dv + x], bf16 ? 3e-1 : 2e-3, "dv");
      }
  }
#define SAME(name, size)                                                  \
  if (c.name)                                                             \
    for (I i = 0; i < c.name##_heads * c.columns * (size); i++)           \
      compare(c.d##name[i], d##name[i], 1e-2, "d" #name);
  SAME(bias, 1)
  SAME(gain, (c.gain_vector ? c.d : 1))
  SAME(query, c.d)
  SAME(key, c.d)
  SAME(value, c.dv)
  while (n) free(blocks[--n]);
  free(q_pos), free(k_pos), free(mask), free(p), free(o), free(dq), free(dk), free(rq), free(rk), free(dv);
  free(dbias), free(dgain), free(dquery), free(dkey), free(dvalue);
}

int main(int argc, char **argv) {
  if (argc != 3) return 3;
  state = (uint64_t)atoll(argv[1]) * 2654435761u + 1;
  for (int i = 0; i < atoi(argv[2]); i++) one();
  printf("%s calls, worst error %.2f of what is allowed\n", argv[2], worst);
  return 0;
}
