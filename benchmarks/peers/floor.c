/* One pass over flat arrays: each value is read once and written once, which is the least memory
   traffic that an optimizer can do. c holds what changes with the step but not with the element. */
#include <math.h>
#include <stdint.h>

#define STEP(name)                                                                               \
    void name(float *restrict p, const float *restrict g, float *restrict s, float *restrict t, \
              const float *restrict c, int64_t n, int threads)
/* Threads cost some microseconds to wake: as torch does, none for few elements. */
#define EACH                                                                                     \
    _Pragma("omp parallel for simd schedule(static) num_threads(threads) if(n > 32768)")         \
    for (int64_t i = 0; i < n; i++)

STEP(sgd) { /* c: lr */
    const float lr = c[0];
    EACH p[i] -= lr * g[i];
}

STEP(momentum) { /* c: lr, momentum */
    const float lr = c[0], mu = c[1];
    EACH {
        const float b = mu * s[i] + g[i];
        s[i] = b;
        p[i] -= lr * b;
    }
}

STEP(adamw) { /* c: decay, beta1, beta2, root of the second correction, eps, step size */
    const float decay = c[0], b1 = c[1], b2 = c[2], root = c[3], eps = c[4], size = c[5];
    EACH {
        const float m = b1 * s[i] + (1 - b1) * g[i];
        const float v = b2 * t[i] + (1 - b2) * g[i] * g[i];
        s[i] = m;
        t[i] = v;
        p[i] = decay * p[i] - size * m / (sqrtf(v) / root + eps);
    }
}

STEP(adagrad) { /* c: lr, eps */
    const float lr = c[0], eps = c[1];
    EACH {
        const float sum = s[i] + g[i] * g[i];
        s[i] = sum;
        p[i] -= lr * g[i] / (sqrtf(sum) + eps);
    }
}

STEP(lion) { /* c: decay, lr, beta1, beta2 */
    const float decay = c[0], lr = c[1], b1 = c[2], b2 = c[3];
    EACH {
        const float d = b1 * s[i] + (1 - b1) * g[i];
        s[i] = b2 * s[i] + (1 - b2) * g[i];
        p[i] = decay * p[i] - lr * ((d > 0.0f) - (d < 0.0f));
    }
}

STEP(qhm) { /* c: lr, beta, nu, weight decay, clip value */
    const float lr = c[0], beta = c[1], nu = c[2], decay = c[3], clip = c[4];
    EACH {
        const float low = g[i] < -clip ? -clip : g[i];
        const float d = (low > clip ? clip : low) + decay * p[i];
        const float b = beta * s[i] + (1 - beta) * d;
        s[i] = b;
        p[i] -= lr * ((1 - nu) * d + nu * b);
    }
}
