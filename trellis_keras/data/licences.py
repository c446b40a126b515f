"""What the published data sets are, where they come from and under which terms."""

_MUSIC = "piano rolls by Boulanger-Lewandowski et al. 2012; no licence is stated with them"
_PTB = (
    "Penn Treebank in Mikolov's preparation; the text, of the Wall Street Journal, is licensed by "
    "the LDC (Treebank-3), for research, and may not be passed on"
)
_WIKITEXT = "articles of Wikipedia (Merity et al. 2016), CC BY-SA 3.0"
_WIKIPEDIA = "the beginning of a dump of Wikipedia (Mahoney 2006), CC BY-SA 3.0 and GFDL"
_MNIST = "digits by LeCun, Cortes and Burges, commonly given as CC BY-SA 3.0"

_ABOUT = {
    "adding": "generated from a seed",
    "copy_memory": "generated from a seed",
    "seq_mnist": _MNIST,
    "permuted_mnist": f"{_MNIST}; one fixed permutation of the pixels",
    "seq_cifar10": "CIFAR-10 by Krizhevsky (2009), who asks for citation; no licence is stated",
    "jsb": _MUSIC,
    "nottingham": _MUSIC,
    "ptb": _PTB,
    "char_ptb": _PTB,
    "wt2": _WIKITEXT,
    "wt103": _WIKITEXT,
    "text8": _WIKIPEDIA,
    "enwik8": _WIKIPEDIA,
    "war_and_peace": "Tolstoy's novel, translated by the Maudes (Project Gutenberg), public domain",
    "lambada": "passages of novels (Paperno et al. 2016), CC BY 4.0; the novels are no part of it",
    "pydoc": "the help texts of the Python in use, PSF licence",
    "text": "a file of your own",
}


def about(name):
    """Returns what a data set of `list_datasets()` is and its terms, in one line.

    Example:

    >>> about("adding")
    'generated from a seed'
    """
    return _ABOUT[name]
