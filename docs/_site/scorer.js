// How the search ranks what it finds: pages for users first; records (pages of results, changes) and pages for those who change the code behind them.
var Scorer = {
  score: (result) => {
    const [docname, , , , score] = result;
    if (/^(benchmarks\/results\/|CHANGELOG$|SECURITY$)/.test(docname)) return score / 8;
    if (/^(docs\/architecture$|CONTRIBUTING$)/.test(docname)) return score / 4;
    return score;
  },
  // The rest is Sphinx's own.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
