"""Layers written as functions, and attention."""

from functools import partial

import torch
import torch.ao.nn.qat
import torch.nn.functional as F
from torch import nn

from support.leaking_networks.kit import IMAGE, TOKENS, WORDS, C, L, P, abc, ac, accepts, either, net, part


def attention(**options):
    return part(nn.MultiheadAttention, 4, 2, **{"batch_first": True, **options})


def tokens(forward, **makers):
    return net(forward, a=L(6, 4), c=L(4, 3), **makers)


def cross(s, x):
    return s.c(s.m(s.a(x), h := torch.tanh(s.b(x)), h)[0].mean(1))


def self_attention(s, x, **options):
    h = s.a(x)
    return s.c(s.m(h, h, h, **options)[0].mean(1))


def rounded(x):
    return (x * 3).long().clamp(0, 8)


CAUSAL = torch.triu(torch.ones(3, 3), 1).bool()
accepts("F.linear", net(lambda s, x: s.c(torch.tanh(F.linear(x, s.w, s.v))), w=P(4, 6), v=P(4), c=L(4, 3)))
accepts(
    "F.conv2d with groups",
    net(lambda s, x: s.c(torch.tanh(F.conv2d(x, s.w, s.v, groups=2)).mean((2, 3))), w=P(4, 1, 3, 3), v=P(4), c=L(4, 3)),
    IMAGE,
)
accepts(
    "F.conv2d with groups behind units",
    net(
        lambda s, x: s.c(F.conv2d(torch.tanh(s.k(x)), s.w, groups=2).mean((2, 3))),
        k=C(2, 4, 3),
        w=P(4, 2, 1, 1),
        c=L(4, 3),
    ),
    IMAGE,
)
accepts(
    "F.conv_transpose2d",
    net(
        lambda s, x: s.c(F.conv_transpose2d(torch.tanh(s.k(x)), s.w).mean((2, 3))),
        k=C(2, 4, 3),
        w=P(4, 4, 2, 2),
        c=L(4, 3),
    ),
    IMAGE,
)
either("einsum with a weight", net(lambda s, x: s.c(torch.einsum("bi,oi->bo", x, s.w)), w=P(4, 6), c=L(4, 3)))
either(
    "einsum over positions",
    net(lambda s, x: s.c(torch.einsum("bti,oi,tp->bpo", x, s.w, s.v).mean(1)), w=P(4, 6), v=P(3, 2), c=L(4, 3)),
    TOKENS,
)
accepts("matmul", net(lambda s, x: s.c(torch.tanh(x @ s.w)), w=P(6, 4), c=L(4, 3)))
either("matmul from the left", net(lambda s, x: s.c(torch.tanh(s.w @ x.T).T), w=P(4, 6), c=L(4, 3)))
either(
    "bmm with a parameter",
    net(lambda s, x: s.c(torch.bmm(x, s.w.expand(x.shape[0], 6, 4)).mean(1)), w=P(1, 6, 4), c=L(4, 3)),
    TOKENS,
)
either("addmm", net(lambda s, x: s.c(torch.tanh(torch.addmm(s.v, x, s.w))), v=P(4), w=P(6, 4), c=L(4, 3)))
either(
    "addmm with factors",
    net(lambda s, x: s.c(torch.addmm(s.a(x), x, s.w, beta=2, alpha=3)), a=L(6, 4), w=P(6, 4), c=L(4, 3)),
)
either(
    "baddbmm",
    net(
        lambda s, x: s.c(torch.baddbmm(s.v, x, s.w.expand(x.shape[0], 6, 4)).mean(1)),
        v=P(1, 1, 4),
        w=P(1, 6, 4),
        c=L(4, 3),
    ),
    TOKENS,
)
either("addmv", net(lambda s, x: s.c((s.a(x) @ s.g).unsqueeze(1) * s.a(x)), a=L(6, 4), g=P(4), c=L(4, 3)))
either("tensordot", net(lambda s, x: s.c(torch.tensordot(x, s.w, ([1], [0]))), w=P(6, 4), c=L(4, 3)))
either("F.bilinear", abc(lambda s, x: s.c(F.bilinear(s.a(x), s.b(x), s.w)), w=P(4, 4, 4)))
either("nn.Bilinear", abc(lambda s, x: s.c(s.l(s.a(x), s.b(x))), l=part(nn.Bilinear, 4, 4, 4)))
either("embedding_bag", net(lambda s, x: s.c(F.embedding_bag(rounded(x), s.w)), w=P(9, 4), c=L(4, 3)))
either("nn.EmbeddingBag", net(lambda s, x: s.c(s.e(rounded(x))), e=part(nn.EmbeddingBag, 9, 4), c=L(4, 3)))

either(
    "embedding with a largest norm",
    net(lambda s, x: s.c(s.e(x).mean(1)), e=part(nn.Embedding, 9, 4, max_norm=1.0), c=L(4, 3)),
    WORDS,
)
either("lstm", tokens(lambda s, x: s.c(s.r(s.a(x))[0][:, -1]), r=part(nn.LSTM, 4, 4, batch_first=True)), TOKENS)
either("gru", tokens(lambda s, x: s.c(s.r(s.a(x))[1][0]), r=part(nn.GRU, 4, 4, batch_first=True)), TOKENS)
either("lstm cell", ac(lambda s, x: s.c(s.r(s.a(x))[0]), r=part(nn.LSTMCell, 4, 4)))
either("rnn over samples", ac(lambda s, x: s.c(s.r(s.a(x))[0]), r=part(nn.RNN, 4, 4)))
accepts(
    "lstm per task",
    tokens(lambda s, x: s.c(s.r(s.a(x))[0][:, -1]), r=part(nn.LSTM, 4, 4, batch_first=True)),
    TOKENS,
    {"task_owned": ["r"]},
)
accepts(
    "lstm of the first task",
    tokens(lambda s, x: s.c(s.r(s.a(x))[0][:, -1]), r=part(nn.LSTM, 4, 4, batch_first=True)),
    TOKENS,
    {"frozen": ["r"]},
)
accepts("self-attention", tokens(self_attention, m=attention()), TOKENS)
accepts("cross-attention", tokens(cross, b=L(6, 4), m=attention()), TOKENS)
accepts("attention with a mask", tokens(partial(self_attention, attn_mask=CAUSAL), m=attention()), TOKENS)
accepts(
    "attention, positions first",
    tokens(lambda s, x: s.c(s.m(*(s.a(x).transpose(0, 1),) * 3)[0].mean(0)), m=attention(batch_first=False)),
    TOKENS,
)
accepts("attention of dropped weights", tokens(self_attention, m=attention(dropout=0.5)), TOKENS, varies=True)
either(
    "attention's weights as features",
    tokens(lambda s, x: s.c(s.m(*(s.a(x),) * 3)[1].flatten(1)[:, :4]), m=attention()),
    TOKENS,
)
either(
    "attention with a padding mask",
    tokens(lambda s, x: self_attention(s, x, key_padding_mask=(x[..., 0] > 0) & (torch.arange(3) > 0)), m=attention()),
    TOKENS,
)
either("attention with one more learned key", tokens(self_attention, m=attention(add_bias_kv=True)), TOKENS)
either("attention with a key of zeros", tokens(self_attention, m=attention(add_zero_attn=True)), TOKENS)
either(
    "attention to keys of another width",
    tokens(lambda s, x: s.c(s.m(s.a(x), x, torch.tanh(s.b(x)))[0].mean(1)), b=L(6, 5), m=attention(kdim=6, vdim=5)),
    TOKENS,
)
either(
    "attention over samples",
    ac(lambda s, x: (h := s.a(x).unsqueeze(1), s.c(s.m(h, h, h)[0].squeeze(1)))[1], m=attention(batch_first=False)),
)
accepts(
    "encoder",
    tokens(
        lambda s, x: s.c(s.m(s.a(x)).mean(1)),
        m=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        ),
    ),
    TOKENS,
)
accepts(
    "encoder layer",
    tokens(lambda s, x: s.c(s.m(s.a(x)).mean(1)), m=part(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)),
    TOKENS,
)
either(
    "encoder layer with a padding mask",
    tokens(
        lambda s, x: s.c(s.m(s.a(x), src_key_padding_mask=(x[..., 0] > 0) & (torch.arange(3) > 0)).mean(1)),
        m=part(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True),
    ),
    TOKENS,
)
either(
    "decoder layer",
    tokens(
        lambda s, x: s.c(s.m(s.a(x), torch.tanh(s.a(x.flip(1)))).mean(1)),
        m=part(nn.TransformerDecoderLayer, 4, 2, 8, 0.0, batch_first=True),
    ),
    TOKENS,
)
either(
    "learned query",
    tokens(
        lambda s, x: s.c(F.scaled_dot_product_attention(s.q.expand(x.shape[0], 1, 4), s.a(x), s.b(x)).mean(1)),
        b=L(6, 4),
        q=P(1, 1, 4),
    ),
    TOKENS,
)
either(
    "learned keys and values",
    net(
        lambda s, x: s.c(F.scaled_dot_product_attention(s.a(x).unsqueeze(1), s.q, s.v).squeeze(1)),
        a=L(6, 4),
        q=P(1, 5, 4),
        v=P(1, 5, 4),
        c=L(4, 3),
    ),
)
either(
    "attention mask from units",
    tokens(
        lambda s, x: (h := s.a(x), s.c(F.scaled_dot_product_attention(h, h, h, attn_mask=(h @ h.mT) > 0).mean(1)))[1]
    ),
    TOKENS,
)
either(
    "learned bias of attention",
    tokens(
        lambda s, x: (h := s.a(x), s.c(F.scaled_dot_product_attention(h, h, h, attn_mask=s.g).mean(1)))[1], g=P(3, 3)
    ),
    TOKENS,
)
either(
    "unfolded convolution",
    net(lambda s, x: s.c(torch.tanh(s.w @ F.unfold(x, 3)).mean(2)), w=P(4, 18), c=L(4, 3)),
    IMAGE,
)
